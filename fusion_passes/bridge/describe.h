// A MindSpore graph as JSON: nodes in topological order, with shapes, dtypes, constants, scopes and source lines.
#ifndef MS_FLASH_FUSION_BRIDGE_DESCRIBE_H_
#define MS_FLASH_FUSION_BRIDGE_DESCRIBE_H_

#include <cmath>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "abstract/abstract_value.h"
#include "abstract/dshape.h"
#include "ir/anf.h"
#include "ir/func_graph.h"
#include "ir/graph_utils.h"
#include "ir/manager.h"
#include "ir/primitive.h"
#include "ir/scalar.h"
#include "ir/scope.h"
#include "ir/tensor.h"
#include "ir/value.h"
#include "nlohmann/json.hpp"
#include "utils/info.h"
#include "utils/trace_info.h"

namespace ms_flash {

using json = nlohmann::json;
namespace ms = mindspore;

// What the pass knows of one graph while Python looks at it. `keep` holds what the JSON points into.
struct Described {
  std::vector<ms::AnfNodePtr> nodes;  // by id
  std::vector<ms::tensor::TensorPtr> keep;
  json graph;
};

class Describer {
 public:
  static void Run(const ms::FuncGraphPtr& graph, Described* out) {
    Describer self(out);
    self.Graph(graph);
  }

 private:
  explicit Describer(Described* out) : out_(out) {}

  void Graph(const ms::FuncGraphPtr& graph) {
    const auto foreign = [&graph](const ms::AnfNodePtr& node) {
      return !node->isa<ms::ValueNode>() && node->func_graph() != graph;
    };
    const auto follow = [&foreign](const ms::AnfNodePtr& node) {
      return foreign(node) ? ms::IncludeType::NOFOLLOW : ms::IncludeType::FOLLOW;
    };
    json nodes = json::array();
    for (const auto& node : ms::TopoSort(graph->get_return(), ms::SuccIncoming, follow)) {
      if (ms::IsValueNode<ms::Primitive>(node)) {
        continue;  // said by the node that calls it
      }
      json described;
      if (foreign(node)) {
        described = {{"op", "Free"}, {"name", node->UniqueName()}};
      } else if (node->isa<ms::CNode>()) {
        described = Call(node->cast<ms::CNodePtr>());
      } else if (node->isa<ms::Parameter>()) {
        described = Parameter(node->cast<ms::ParameterPtr>());
      } else {
        described = Constant(node->cast<ms::ValueNodePtr>());
      }
      Type(node->abstract(), &described);
      Add(node, std::move(described), &nodes);
    }
    Add(nullptr, {{"op", "OtherGraphs"}, {"inputs", UsedElsewhere(graph)}}, &nodes);
    out_->graph = {{"version", 1},
                   {"graph", graph->ToString()},
                   {"nodes", std::move(nodes)},
                   {"outputs", json::array({ids_.at(graph->output().get())})}};
  }

  void Add(const ms::AnfNodePtr& node, json described, json* nodes) {
    const size_t id = out_->nodes.size();
    described["id"] = id;
    ids_[node.get()] = id;
    out_->nodes.push_back(node);
    nodes->push_back(std::move(described));
  }

  // What other graphs (branches, loop bodies) take from this one.
  json UsedElsewhere(const ms::FuncGraphPtr& graph) const {
    json ids = json::array();
    const auto& users = graph->manager()->node_users();
    for (size_t id = 0; id < out_->nodes.size(); ++id) {
      const auto& node = out_->nodes[id];
      const auto found = users.find(node);
      if (found == users.end() || node->isa<ms::ValueNode>() || node->func_graph() != graph) {
        continue;
      }
      for (const auto& [user, index] : found->second) {
        if (user->func_graph() != graph) {
          ids.push_back(id);
          break;
        }
      }
    }
    return ids;
  }

  json Call(const ms::CNodePtr& node) {
    json described, inputs = json::array();
    const auto& operands = node->inputs();
    const auto primitive = ms::GetValueNode<ms::PrimitivePtr>(operands[0]);
    described["op"] = primitive ? primitive->name() : "Call";
    for (size_t i = primitive ? 1 : 0; i < operands.size(); ++i) {
      const auto found = ids_.find(operands[i].get());
      // A primitive passed as a value is not a node of its own.
      inputs.push_back(found == ids_.end() ? json(nullptr) : json(found->second));
    }
    described["inputs"] = std::move(inputs);
    if (primitive) {
      json attrs = json::object();
      for (const auto& [name, value] : primitive->attrs()) {
        json known = Plain(value);
        if (!known.is_discarded()) {
          attrs[name] = std::move(known);
        }
      }
      described["attrs"] = std::move(attrs);
    }
    described["scope"] = node->scope() ? node->scope()->name() : "";
    described["line"] = Line(node->debug_info());
    return described;
  }

  static json Parameter(const ms::ParameterPtr& node) {
    return {{"op", "Parameter"}, {"name", node->name()}, {"weight", node->has_default()}};
  }

  json Constant(const ms::ValueNodePtr& node) {
    const auto& value = node->value();
    if (value->isa<ms::FuncGraph>()) {
      return {{"op", "FuncGraph"}, {"name", value->ToString()}};
    }
    json described = {{"op", "Const"}, {"type", "other"}};
    if (value->isa<ms::tensor::Tensor>()) {
      described["type"] = "Tensor";
      auto tensor = value->cast<ms::tensor::TensorPtr>()->cpu();
      if (tensor != nullptr && tensor->data_c() != nullptr) {
        described["data"] = {{"address", reinterpret_cast<uintptr_t>(tensor->data_c())}, {"bytes", tensor->Size()}};
        out_->keep.push_back(std::move(tensor));
      }
      return described;
    }
    json plain = Plain(value);
    if (plain.is_discarded()) {
      described["text"] = value->ToString().substr(0, 200);
      return described;
    }
    described["value"] = std::move(plain);
    if (value->isa<ms::None>()) {
      described["type"] = "None";
    } else if (value->isa<ms::Type>()) {
      described["type"] = "type";
    } else if (value->isa<ms::ValueSequence>()) {
      described["type"] = value->isa<ms::ValueTuple>() ? "tuple" : "list";
    } else if (value->type() != nullptr) {
      described["type"] = TypeName(value->type());
    }
    return described;
  }

  // A value in JSON, or "discarded" for one that has no such form.
  static json Plain(const ms::ValuePtr& value) {
    if (value == nullptr || value->isa<ms::None>()) return nullptr;
    if (value->isa<ms::BoolImm>()) return ms::GetValue<bool>(value);
    if (value->isa<ms::Int64Imm>()) return ms::GetValue<int64_t>(value);
    if (value->isa<ms::Int32Imm>()) return ms::GetValue<int32_t>(value);
    if (value->isa<ms::Int16Imm>()) return ms::GetValue<int16_t>(value);
    if (value->isa<ms::Int8Imm>()) return ms::GetValue<int8_t>(value);
    if (value->isa<ms::UInt8Imm>()) return ms::GetValue<uint8_t>(value);
    if (value->isa<ms::UInt32Imm>()) return ms::GetValue<uint32_t>(value);
    if (value->isa<ms::UInt64Imm>()) return ms::GetValue<uint64_t>(value);
    if (value->isa<ms::FP32Imm>()) return Number(ms::GetValue<float>(value));
    if (value->isa<ms::FP64Imm>()) return Number(ms::GetValue<double>(value));
    if (value->isa<ms::StringImm>()) return ms::GetValue<std::string>(value);
    if (value->isa<ms::Type>()) return TypeName(value->cast<ms::TypePtr>());
    if (value->isa<ms::ValueSequence>()) {
      json list = json::array();
      for (const auto& element : value->cast<ms::ValueSequencePtr>()->value()) {
        json plain = Plain(element);
        if (plain.is_discarded()) return plain;
        list.push_back(std::move(plain));
      }
      return list;
    }
    return json(json::value_t::discarded);
  }

  static json Number(double value) {
    if (std::isfinite(value)) return value;
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  }

  static std::string TypeName(const ms::TypePtr& type) {
    if (type == nullptr) return "";
    if (type->isa<ms::TensorType>()) return TypeName(type->cast<ms::TensorTypePtr>()->element());
    if (type->isa<ms::Function>()) return "function";
    try {
      return ms::TypeIdToString(type->type_id(), true);
    } catch (const std::exception&) {  // MindSpore has types without a name, which must not hide the rest of the graph
      return "other";
    }
  }

  static void Type(const ms::abstract::AbstractBasePtr& abstract, json* node) {
    if (abstract == nullptr) {
      return;
    }
    (*node)["shape"] = Shape(abstract->GetShape());
    (*node)["dtype"] = Dtype(abstract);
  }

  // A list for a Tensor, a list of such for a tuple, null for what has no shape (numbers, monads, functions).
  static json Shape(const ms::BaseShapePtr& shape) {
    if (shape == nullptr) return nullptr;
    if (shape->isa<ms::abstract::TensorShape>()) return shape->cast<ms::abstract::TensorShapePtr>()->shape();
    if (shape->isa<ms::abstract::SequenceShape>()) {
      json list = json::array();
      for (const auto& element : shape->cast<ms::abstract::SequenceShapePtr>()->shape()) {
        list.push_back(Shape(element));
      }
      return list;
    }
    return nullptr;
  }

  static json Dtype(const ms::abstract::AbstractBasePtr& abstract) {
    if (abstract->isa<ms::abstract::AbstractSequence>()) {
      json list = json::array();
      const auto sequence = abstract->cast<ms::abstract::AbstractSequencePtr>();
      if (sequence->dynamic_len()) return nullptr;
      for (const auto& element : sequence->elements()) {
        list.push_back(Dtype(element));
      }
      return list;
    }
    return TypeName(abstract->GetType());
  }

  // "file.py:12" of the user's code: the innermost place outside MindSpore and this package, or else the innermost.
  std::string Line(const ms::DebugInfoPtr& info) {
    std::string innermost;
    for (auto at = info; at != nullptr;) {
      const auto place = at->location();
      if (place != nullptr && !place->invalid()) {
        const std::string text = place->file_name() + ":" + std::to_string(place->line());
        const auto& file = place->file_name();
        if (file.find("/mindspore/") == std::string::npos && file.find("/fusion_passes/") == std::string::npos) {
          return text;
        }
        if (innermost.empty()) {
          innermost = text;
        }
      }
      const auto trace = at->trace_info();
      at = trace == nullptr ? nullptr : trace->debug_info();
    }
    return innermost;
  }

  Described* out_;
  std::unordered_map<const ms::AnfNode*, size_t> ids_;
};

}  // namespace ms_flash

#endif  // MS_FLASH_FUSION_BRIDGE_DESCRIBE_H_
