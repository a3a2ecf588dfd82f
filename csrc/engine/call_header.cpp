#include "engine/call_header.h"

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace pycomm::engine {

bool same_call(const transport::Header& a, const transport::Header& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.op == b.op &&
         a.algorithm == b.algorithm && a.peer == b.peer && a.count == b.count;
}

std::string describe(const transport::Header& header) {
  const auto named = [](const auto& table, uint8_t i) {
    return i < table.size() ? std::string(table[i]) : "unknown " + std::to_string(i);
  };
  std::string text = named(kOperations, header.operation) + "(";
  if (header.operation == static_cast<uint8_t>(Operation::barrier)) return text + ")";
  text += header.dtype < kDtypes.size() ? std::string(kDtypes[header.dtype].name) : "unknown dtype";
  const std::string count = std::to_string(header.count), peer = std::to_string(header.peer);
  const std::string what = header.peer == 0 ? ""
                                            : ", pass " + std::to_string(header.peer >> 16) +
                                                  " of parameters with hash " +
                                                  std::to_string(header.peer & 0xffff);
  switch (static_cast<Operation>(header.operation)) {
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      text += ", count " + count + ", " + named(kReduceOps, header.op) + what;
      break;
    case Operation::reduce:
      text += ", count " + count + ", " + named(kReduceOps, header.op) + ", root " + peer;
      break;
    case Operation::broadcast:
    case Operation::gather:
    case Operation::scatter:
      text += ", count " + count + ", root " + peer;
      break;
    case Operation::send:
    case Operation::recv:
      text += ", count " + count + ", tag " + peer;
      break;
    case Operation::all_gather:
      text += header.peer == 0 ? ", count " + count
                               : ", counts of a list with sum " + count + " and hash " + peer +
                                     ", or count " + count + what;
      break;
    case Operation::all_to_all:
      text +=
          header.peer == 1 ? ", counts by rank" : ", count " + count + " from the one to the other";
      if (header.peer > 2) text += what;
      break;
    case Operation::barrier:
      break;
  }
  const bool on_device = (header.algorithm & transport::kOnDevice) != 0;
  return text + ", " +
         named(kAlgorithms, header.algorithm & static_cast<uint8_t>(~transport::kOnDevice)) +
         (on_device ? ", on CUDA devices)" : ")");
}

std::string describe_activity(const transport::Header& header) {
  const std::string call = "call " + std::to_string(header.sequence) + ", " + describe(header);
  if (header.kind == transport::FrameKind::data) return "with a frame of " + call;
  switch (static_cast<transport::CallState>(header.context)) {
    case transport::CallState::not_started:
      return "before its first call";
    case transport::CallState::in_call:
      return "inside " + call;
    case transport::CallState::idle:
      return "outside of calls, after " + call;
  }
  return {};
}

}  // namespace pycomm::engine
