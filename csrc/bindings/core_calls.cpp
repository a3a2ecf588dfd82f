// The short way of the calls that training makes most: from a plain array to the group without a
// look at names, views and shapes in Python. pycomm.collectives takes it first.
#include <string>
#include <string_view>

#include "bindings/core.h"
#include "bindings/core_plain.h"

namespace pycomm::bindings {
namespace {

// As `find` in a table of names, but 0 for None.
Algorithm algorithm_from(const py::handle& name) {
  return name.is_none() ? Algorithm::automatic
                        : find<Algorithm>(kAlgorithms, name.cast<std::string_view>(), "algorithm");
}

// False, and nothing done, where the array is not plain.
bool go(const Handle& handle, const py::handle& x, Call& call) {
  const auto plain = Plain::of(x.ptr());
  if (!plain) return false;
  call.dtype = plain->dtype();
  call.input = plain->data();
  call.output = plain->data();
  call.count = plain->count();
  Group& group = handle.group();
  {
    const Blocking blocking;
    group.run(call);
  }
  throw_pending();
  return true;
}

bool all_reduce(const Handle& handle, const py::handle& x, std::string_view op,
                const py::handle& algorithm, double timeout_s) {
  Call call;
  call.operation = Operation::all_reduce;
  call.op = find<ReduceOp>(kReduceOps, op, "op");
  call.algorithm = algorithm_from(algorithm);
  call.timeout = nanoseconds(timeout_s);
  return go(handle, x, call);
}

bool broadcast(const Handle& handle, const py::handle& x, int src, const py::handle& algorithm,
               double timeout_s) {
  Call call;
  call.operation = Operation::broadcast;
  call.peer = src;
  call.algorithm = algorithm_from(algorithm);
  call.timeout = nanoseconds(timeout_s);
  return go(handle, x, call);
}

}  // namespace

void bind_calls(py::module_& module) {
  module.def("all_reduce", &all_reduce);
  module.def("broadcast", &broadcast);
}

}  // namespace pycomm::bindings
