// Applies a plan (JSON) to a graph: first all new nodes are made and everything is checked, then old ones are replaced.
#ifndef MS_FLASH_FUSION_BRIDGE_APPLY_H_
#define MS_FLASH_FUSION_BRIDGE_APPLY_H_

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "describe.h"
#include "ir/manager.h"
#include "ir/tensor_new.h"

// Only a pointer: what MindSpore's converter of Python objects expects, without pybind11 and its tie to one Python.
namespace pybind11 {
class object {
 public:
  explicit object(void* pointer) : pointer_(pointer) {}

 private:
  void* pointer_;
};
}  // namespace pybind11

namespace mindspore::parse::data_converter {
ValuePtr PyDataToValue(const pybind11::object& object);
}  // namespace mindspore::parse::data_converter

namespace ms_flash {

class Applier {
 public:
  Applier(const ms::FuncGraphPtr& graph, const std::vector<ms::AnfNodePtr>& nodes, const std::vector<void*>& objects)
      : graph_(graph), nodes_(nodes), objects_(objects) {}

  void Run(const json& plan) {
    auto manager = graph_->manager();
    if (manager == nullptr) {
      throw std::runtime_error("the graph has no manager");
    }
    for (const auto& described : plan.at("new")) {
      const auto name = described.at("id").get<std::string>();
      if (!made_.emplace(name, Make(described)).second) {
        throw std::runtime_error("two new nodes are called " + name);
      }
    }
    std::vector<std::pair<ms::AnfNodePtr, ms::AnfNodePtr>> pairs;
    for (const auto& pair : plan.at("replace")) {
      auto old = Own(pair.at(0)), replacement = Operand(pair.at(1));
      CheckSameType(pair, old, replacement);
      if (!replaced_.emplace(old.get(), replacement).second) {
        throw std::runtime_error("node " + pair.at(0).dump() + " is replaced twice");
      }
      pairs.emplace_back(std::move(old), std::move(replacement));
    }
    for (const auto& pair : plan.value("order", json::array())) {
      Reorder(Existing(pair.at(0)), Operand(pair.at(1)));
    }
    ReconnectNew();
    CheckNoCycle();
    auto changes = manager->Transact();
    for (const auto& [old, replacement] : pairs) {
      const auto users = manager->node_users().find(old);
      if (users == manager->node_users().end() || !changes.Replace(old, replacement)) {
        throw std::runtime_error("node " + old->DebugString() + " cannot be replaced");
      }
    }
    for (const auto& [edge, input] : reordered_) {
      changes.SetEdge(edge.first, edge.second, input);
    }
    changes.Commit();
    for (const auto& [edge, input] : reordered_) {
      UpdateTupleType(edge.first);
    }
  }

 private:
  ms::AnfNodePtr Existing(const json& id) const {
    const auto index = id.get<size_t>();
    if (index >= nodes_.size() || nodes_[index] == nullptr) {
      throw std::runtime_error("there is no node " + std::to_string(index));
    }
    return nodes_[index];
  }

  // A node that may be replaced: one of this graph.
  ms::AnfNodePtr Own(const json& id) const {
    auto node = Existing(id);
    if (node->func_graph() != graph_) {
      throw std::runtime_error("node " + id.dump() + " is of another graph");
    }
    return node;
  }

  ms::AnfNodePtr Made(const json& id) const {
    const auto found = made_.find(id.get<std::string>());
    if (found == made_.end()) {
      throw std::runtime_error("there is no new node " + id.dump());
    }
    return found->second;
  }

  ms::AnfNodePtr Operand(const json& operand) {
    if (operand.is_number()) return Existing(operand);
    if (operand.is_string()) return Made(operand);
    if (operand.contains("item")) {
      const auto& of = operand["item"].at(0);
      return Item(of.is_string() ? Made(of) : Existing(of), operand["item"].at(1).get<int64_t>());
    }
    if (operand.contains("none")) return Constant(ms::kNone);
    if (operand.contains("const")) return Constant(Value(operand["const"], operand.value("type", "")));
    if (operand.contains("tensor")) return Constant(TensorValue(operand["tensor"]));
    throw std::runtime_error("an operand must be an id, an item, a const, a tensor or none, but got " + operand.dump());
  }

  ms::AnfNodePtr Constant(const ms::ValuePtr& value) {
    auto node = ms::NewValueNode(value);
    node->set_abstract(value->ToAbstract());
    keep_.push_back(node);
    return node;
  }

  static ms::ValuePtr Value(const json& value, const std::string& type) {
    if (type == "float32") return ms::MakeValue(static_cast<float>(value.get<double>()));
    if (type == "dtype") return ms::TypeIdToType(TypeId(value.get<std::string>()));
    if (value.is_boolean()) return ms::MakeValue(value.get<bool>());
    if (value.is_number_integer()) return ms::MakeValue(value.get<int64_t>());
    if (value.is_number()) return ms::MakeValue(static_cast<float>(value.get<double>()));
    if (value.is_string()) return ms::MakeValue(value.get<std::string>());
    if (value.is_array()) {
      std::vector<ms::ValuePtr> elements;
      for (const auto& element : value) elements.push_back(Value(element, ""));
      return std::make_shared<ms::ValueTuple>(elements);
    }
    throw std::runtime_error("no constant can be made of " + value.dump());
  }

  // {"dtype": "int64", "shape": [...], "values": [numbers]}; floating dtypes are converted from double.
  static ms::ValuePtr TensorValue(const json& tensor) {
    auto values = tensor.at("values").get<std::vector<double>>();
    const auto shape = tensor.at("shape").get<ms::ShapeVector>();
    const auto dtype = TypeId(tensor.at("dtype").get<std::string>());
    return ms::tensor::from_buffer(dtype, shape, values.data(), ms::kNumberTypeFloat64);
  }

  static ms::TypeId TypeId(const std::string& name) {
    static const std::map<std::string, ms::TypeId> known = {
        {"bool", ms::kNumberTypeBool},       {"uint8", ms::kNumberTypeUInt8},      {"int32", ms::kNumberTypeInt32},
        {"int64", ms::kNumberTypeInt64},     {"float16", ms::kNumberTypeFloat16},  {"float32", ms::kNumberTypeFloat32},
        {"float64", ms::kNumberTypeFloat64}, {"bfloat16", ms::kNumberTypeBFloat16}};
    const auto found = known.find(name);
    if (found == known.end()) {
      throw std::runtime_error("unknown dtype " + name);
    }
    return found->second;
  }

  ms::AnfNodePtr Item(const ms::AnfNodePtr& of, int64_t index) {
    const auto key = std::make_pair(of.get(), index);
    const auto found = items_.find(key);
    if (found != items_.end()) {
      return found->second;
    }
    const auto tuple = of->abstract() ? of->abstract()->cast<ms::abstract::AbstractTuplePtr>() : nullptr;
    if (tuple == nullptr || index < 0 || static_cast<size_t>(index) >= tuple->size()) {
      throw std::runtime_error("item " + std::to_string(index) + " is taken of a node that does not have it");
    }
    auto node = NewNode(std::make_shared<ms::Primitive>("TupleGetItem"), {of, Constant(ms::MakeValue(index))}, of);
    node->set_abstract(tuple->elements()[index]);
    return items_[key] = node;
  }

  ms::CNodePtr NewNode(const ms::ValuePtr& primitive, const std::vector<ms::AnfNodePtr>& operands,
                       const ms::AnfNodePtr& like) {
    std::vector<ms::AnfNodePtr> inputs = {ms::NewValueNode(primitive)};
    inputs[0]->set_abstract(primitive->ToAbstract());
    keep_.push_back(inputs[0]);
    inputs.insert(inputs.end(), operands.begin(), operands.end());
    auto node = graph_->NewCNode(inputs);
    if (like != nullptr) {
      node->set_scope(like->scope());
      node->set_debug_info(std::make_shared<ms::NodeDebugInfo>(std::make_shared<ms::TraceOpt>(like->debug_info())));
    }
    keep_.push_back(node);
    return node;
  }

  ms::AnfNodePtr Make(const json& described) {
    ms::ValuePtr primitive;
    if (described.contains("prim")) {
      const auto index = described["prim"].get<size_t>();
      if (index >= objects_.size()) {
        throw std::runtime_error("there is no primitive " + std::to_string(index));
      }
      primitive = ms::parse::data_converter::PyDataToValue(pybind11::object(objects_[index]));
    } else {
      primitive = std::make_shared<ms::Primitive>(described.at("op").get<std::string>());
    }
    if (primitive == nullptr || !primitive->isa<ms::Primitive>()) {
      throw std::runtime_error("not a primitive in new node " + described.at("id").dump());
    }
    if (described.contains("attrs")) {
      for (const auto& [name, value] : described["attrs"].items()) {
        primitive->cast<ms::PrimitivePtr>()->AddAttr(name, Value(value, ""));
      }
    }
    std::vector<ms::AnfNodePtr> operands;
    for (const auto& operand : described.at("inputs")) {
      operands.push_back(Operand(operand));
    }
    auto node = NewNode(primitive, operands, described.contains("like") ? Existing(described["like"]) : nullptr);
    node->set_abstract(Abstract(described.at("shape"), described.at("dtype")));
    return node;
  }

  static ms::abstract::AbstractBasePtr Abstract(const json& shape, const json& dtype) {
    if (dtype.is_array()) {
      ms::abstract::AbstractBasePtrList elements;
      for (size_t i = 0; i < dtype.size(); ++i) {
        elements.push_back(Abstract(shape.at(i), dtype[i]));
      }
      return std::make_shared<ms::abstract::AbstractTuple>(elements);
    }
    return std::make_shared<ms::abstract::AbstractTensor>(ms::TypeIdToType(TypeId(dtype.get<std::string>())),
                                                          shape.get<ms::ShapeVector>());
  }

  // Where `old` only stands for "when it has run", `input` stands from now on: otherwise it would be kept alive.
  void Reorder(const ms::AnfNodePtr& old, const ms::AnfNodePtr& input) {
    const auto& users = graph_->manager()->node_users();
    const auto found = users.find(old);
    if (found == users.end()) {
      return;
    }
    for (const auto& [user, index] : found->second) {
      const bool orders =
          Calls(user, "UpdateState") || (Calls(user, "Depend") && index >= 2) || OnlyOrders(user, users);
      if (orders) {
        reordered_.emplace(std::make_pair(user, index), input);
      }
    }
  }

  static bool Calls(const ms::AnfNodePtr& node, const std::string& name) {
    const auto call = node->cast<ms::CNodePtr>();
    const auto primitive = call == nullptr ? nullptr : ms::GetValueNode<ms::PrimitivePtr>(call->input(0));
    return primitive != nullptr && primitive->name() == name;
  }

  // A tuple that only UpdateState takes.
  static bool OnlyOrders(const ms::AnfNodePtr& node, const ms::NodeUsersMap& users) {
    const auto found = users.find(node);
    if (!Calls(node, "MakeTuple") || found == users.end()) {
      return false;
    }
    for (const auto& [user, index] : found->second) {
      if (!Calls(user, "UpdateState")) {
        return false;
      }
    }
    return true;
  }

  static void UpdateTupleType(const ms::AnfNodePtr& node) {
    if (!Calls(node, "MakeTuple")) {
      return;
    }
    const auto call = node->cast<ms::CNodePtr>();
    ms::abstract::AbstractBasePtrList elements;
    for (size_t i = 1; i < call->size(); ++i) {
      elements.push_back(call->input(i)->abstract());
    }
    node->set_abstract(std::make_shared<ms::abstract::AbstractTuple>(elements));
  }

  // The input as it will be.
  ms::AnfNodePtr Input(const ms::CNodePtr& call, size_t index) const {
    const auto edge = reordered_.find({call, static_cast<int>(index)});
    if (edge != reordered_.end()) {
      return edge->second;
    }
    const auto found = replaced_.find(call->input(index).get());
    return found == replaced_.end() ? call->input(index) : found->second;
  }

  // A new node may take a node that another new one replaces: one attention feeding the next. The manager does not know
  // new nodes yet, so it would leave them with the old one.
  void ReconnectNew() {
    for (const auto& node : keep_) {
      const auto call = node->cast<ms::CNodePtr>();
      for (size_t i = 1; call != nullptr && i < call->size(); ++i) {
        const auto found = replaced_.find(call->input(i).get());
        if (found != replaced_.end()) {
          call->set_input(i, found->second);
        }
      }
    }
  }

  // A cycle would send MindSpore into endless recursion.
  void CheckNoCycle() const {
    enum State { kOpen, kDone };
    std::unordered_map<const ms::AnfNode*, State> states;
    std::vector<ms::AnfNodePtr> stack = {graph_->get_return()};
    while (!stack.empty()) {
      const auto node = stack.back();
      const auto [at, first] = states.emplace(node.get(), kOpen);
      if (!first) {
        at->second = kDone;
        stack.pop_back();
        continue;
      }
      const auto call = node->cast<ms::CNodePtr>();
      for (size_t i = 0; call != nullptr && i < call->size(); ++i) {
        auto input = Input(call, i);
        const auto seen = states.find(input.get());
        if (seen == states.end()) {
          stack.push_back(std::move(input));
        } else if (seen->second == kOpen) {
          throw std::runtime_error("the plan makes a cycle through " + input->DebugString());
        }
      }
    }
  }

  static void CheckSameType(const json& pair, const ms::AnfNodePtr& old, const ms::AnfNodePtr& replacement) {
    const auto was = old->abstract(), is = replacement->abstract();
    if (was == nullptr || is == nullptr) {
      throw std::runtime_error("no type is known for the replacement " + pair.dump());
    }
    if (!(*was->GetShape() == *is->GetShape()) || !(*was->GetType() == *is->GetType())) {
      throw std::runtime_error("the replacement " + pair.dump() + " is " + is->GetType()->ToString() +
                               is->GetShape()->ToString() + " in the place of " + was->GetType()->ToString() +
                               was->GetShape()->ToString());
    }
  }

  ms::FuncGraphPtr graph_;
  const std::vector<ms::AnfNodePtr>& nodes_;
  const std::vector<void*>& objects_;
  std::map<std::string, ms::AnfNodePtr> made_;
  std::unordered_map<const ms::AnfNode*, ms::AnfNodePtr> replaced_;
  std::map<std::pair<const ms::AnfNode*, int64_t>, ms::AnfNodePtr> items_;
  std::map<std::pair<ms::AnfNodePtr, int>, ms::AnfNodePtr> reordered_;  // by user and input
  std::vector<ms::AnfNodePtr> keep_;  // a graph holds its nodes by weak pointers until they are connected
};

inline void Apply(const ms::FuncGraphPtr& graph, const std::vector<ms::AnfNodePtr>& nodes, const json& plan,
                  const std::vector<void*>& objects) {
  Applier(graph, nodes, objects).Run(plan);
}

}  // namespace ms_flash

#endif  // MS_FLASH_FUSION_BRIDGE_APPLY_H_
