# cmake -DMSF_ROOT=op_impl -DMSF_STAGE=folder -P stage.cmake: all sources of the kernels in one flat folder.
file(GLOB sources ${MSF_ROOT}/ascendc/op_kernel/*.cpp ${MSF_ROOT}/ascendc/op_kernel/*.h ${MSF_ROOT}/ascendc/*.h
     ${MSF_ROOT}/common/*.h)
file(REMOVE_RECURSE ${MSF_STAGE})
foreach(source IN LISTS sources)
  get_filename_component(name ${source} NAME)
  if(EXISTS ${MSF_STAGE}/${name})
    message(FATAL_ERROR "two sources of the kernels are called ${name}")
  endif()
  file(READ ${source} text)
  string(REGEX REPLACE "#include \"(ascendc|common)/" "#include \"" text "${text}")
  file(WRITE ${MSF_STAGE}/${name} "${text}")
endforeach()
