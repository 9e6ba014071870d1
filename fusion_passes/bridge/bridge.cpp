// The plugin that MindSpore loads: hands every graph to a callback and applies the plan that comes back.
// It knows nothing of attention and uses no Python API of its own, so one build serves every Python version.
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "apply.h"
#include "describe.h"
#include "include/utils/custom_pass/custom_pass_plugin.h"

namespace ms_flash {

// Returns 0 when it left the graph alone, 1 when it changed it, 2 when compilation is to stop with the error that
// ms_flash_bridge_stop was told. `pass` is valid during the call only.
using Callback = int (*)(void* pass, const char* graph);

struct PassRun {
  ms::FuncGraphPtr graph;
  Described described;
};

Callback g_callback = nullptr;
thread_local std::string t_stop;

class BridgePass : public ms::opt::Pass {
 public:
  BridgePass() : Pass("ms_flash_fusion") {}

  bool Run(const ms::FuncGraphPtr& root) override {
    if (g_callback == nullptr || root == nullptr || root->get_return() == nullptr || root->manager() == nullptr) {
      return false;
    }
    std::vector<ms::FuncGraphPtr> graphs = {root};
    for (const auto& graph : root->manager()->func_graphs()) {
      if (graph != root && graph->get_return() != nullptr) {
        graphs.push_back(graph);  // branches and loop bodies
      }
    }
    bool changed = false;
    for (const auto& graph : graphs) {
      changed |= RunOne(graph, graph == root, graph == graphs.back());
    }
    return changed;
  }

 private:
  static bool RunOne(const ms::FuncGraphPtr& graph, bool root, bool last) {
    PassRun run{graph, {}};
    std::string text;
    try {
      Describer::Run(graph, &run.described);
      run.described.graph["root"] = root;
      run.described.graph["last"] = last;
      text = Text(run.described.graph);
    } catch (const std::exception& error) {
      text = Text({{"error", error.what()}});
    }
    const int result = g_callback(&run, text.c_str());
    if (result == 2) {
      throw std::runtime_error(t_stop);
    }
    return result == 1;
  }

  // Names may hold bytes that are no UTF-8, which JSON cannot.
  static std::string Text(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }
};

class BridgePlugin : public ms::opt::CustomPassPlugin {
 public:
  std::string GetPluginName() const override { return "ms_flash"; }
  std::vector<std::string> GetAvailablePassNames() const override { return {"ms_flash_fusion"}; }
  std::shared_ptr<ms::opt::Pass> CreatePass(const std::string& name) const override {
    return name == "ms_flash_fusion" ? std::make_shared<BridgePass>() : nullptr;
  }
};

}  // namespace ms_flash

using ms_flash::BridgePlugin;
EXPORT_CUSTOM_PASS_PLUGIN(BridgePlugin)

extern "C" {
COMMON_EXPORT void ms_flash_bridge_set_callback(ms_flash::Callback callback) { ms_flash::g_callback = callback; }

// Applies a plan to the graph of `pass`. `objects` are Python primitives (PyObject*) that the plan refers to by index;
// the caller holds the GIL. Returns "" or what is wrong with the plan, and then the graph is as it was.
COMMON_EXPORT const char* ms_flash_bridge_apply(void* pass, const char* plan, void* const* objects, int count) {
  static thread_local std::string error;
  auto* run = static_cast<ms_flash::PassRun*>(pass);
  try {
    ms_flash::Apply(run->graph, run->described.nodes, ms_flash::json::parse(plan),
                    std::vector<void*>(objects, objects + count));
    error.clear();
  } catch (const std::exception& failure) {
    error = failure.what();
    if (error.empty()) error = "unknown error";
  }
  return error.c_str();
}

// The text of the error that ends compilation when the callback returns 2.
COMMON_EXPORT void ms_flash_bridge_stop(const char* text) { ms_flash::t_stop = text; }
}
