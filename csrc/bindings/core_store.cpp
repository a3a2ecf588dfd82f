// The rendezvous stores, and connect().
#include <pybind11/stl.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "group/connect.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store.h"
#include "rendezvous/tcp_store.h"
#include "testing/faulty.h"
#include "testing/rate_limited.h"

namespace pycomm::bindings {
namespace {

// A store implemented in Python, with the methods of Store in _core.pyi.
class PythonStore : public rendezvous::Store {
 public:
  // Throws InvalidArgument if a method is missing: those of failures are called too late to say so.
  explicit PythonStore(py::object object) : object_(std::move(object)) {
    for (const char* method : {"set", "get", "add", "remove", "claim"})
      if (!py::hasattr(object_, method))
        throw InvalidArgument("invalid store: it has no method " + std::string(method) + "()");
  }

  void set(const std::string& key, const std::string& value, const Deadline& deadline) override {
    const Asking asking;
    call(deadline, "set", key, py::bytes(value));
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    const Asking asking;
    return call(deadline, "get", key).cast<py::bytes>();
  }
  int64_t add(const std::string& key, int64_t amount, const Deadline& deadline) override {
    const Asking asking;
    return call(deadline, "add", key, amount).cast<int64_t>();
  }
  std::optional<std::string> remove(const std::string& key, const Deadline& deadline) override {
    const Asking asking;
    const py::object value = call(deadline, "remove", key);
    if (value.is_none()) return std::nullopt;
    return value.cast<py::bytes>();
  }

  void get_missing(Values& values, const Deadline& deadline) override {
    const Asking asking;
    if (!get_all(values, deadline, py::none())) Store::get_missing(values, deadline);
  }
  bool limited() const override {
    const py::gil_scoped_acquire gil;
    return !py::hasattr(object_, "get_all");
  }
  void exchange(const std::string& key, const std::string& value, Values& values,
                const Deadline& deadline) override {
    const Asking asking;
    if (!get_all(values, deadline, py::make_tuple(key, py::bytes(value))))
      Store::exchange(key, value, values, deadline);
  }
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline) override {
    const Asking asking;
    return call(deadline, "claim", key, py::bytes(value)).cast<py::bytes>();
  }

 private:
  // Sets aside an exception that a signal handler raised: Python cannot run with a pending one, and
  // an interrupted rank still removes its keys from the store.
  struct Asking {
    py::gil_scoped_acquire gil{};
    py::error_scope pending{};
  };

  // Fetches the missing values in one call, after storing `own`. False: Python's store has no
  // get_all(). Requires the GIL.
  bool get_all(Values& values, const Deadline& deadline, const py::object& own) {
    if (!py::hasattr(object_, "get_all")) return false;
    py::list keys;
    for (const auto& [key, value] : values)
      if (!value) keys.append(key);
    if (keys.empty() && own.is_none()) return true;
    const double left_s = std::chrono::duration<double>(deadline.left()).count();
    const auto found = ask("get_all", keys, left_s, own).cast<std::vector<py::bytes>>();
    size_t i = 0;
    for (auto& [key, value] : values)
      if (!value) value = found.at(i++);
    return true;
  }

  // Calls the method with the given arguments and the remaining seconds. Requires the GIL.
  template <typename... Given>
  py::object call(const Deadline& deadline, const char* method, Given&&... given) {
    return ask(method, std::forward<Given>(given)...,
               std::chrono::duration<double>(deadline.left()).count());
  }

  template <typename... Given>
  py::object ask(const char* method, Given&&... given) {
    try {
      return object_.attr(method)(std::forward<Given>(given)...);
    } catch (py::error_already_set& error) {
      const auto errors = py::module_::import("pycomm.errors");
      if (error.matches(errors.attr("Timeout"))) throw Timeout(py::str(error.value()));
      if (error.matches(errors.attr("PeerLost"))) throw PeerLost(py::str(error.value()));
      throw;
    }
  }

  py::object object_;
};

// Logs one line through Python's logging. Any thread may call; must not fail.
void log(const std::string& line) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  const py::error_scope pending;
  try {
    py::module_::import("logging").attr("getLogger")("pycomm").attr("info")("%s", line);
  } catch (const py::error_already_set&) {
    PyErr_Clear();  // a failed log line must not end a call
  }
}

std::unique_ptr<rendezvous::TcpStore> serve(const std::string& host, uint16_t port,
                                            const std::string& key) {
  const Blocking blocking;
  return rendezvous::TcpStore::serve(host, port, key);
}

std::unique_ptr<rendezvous::TcpStore> connect_store(const std::string& host, uint16_t port,
                                                    const std::string& key, double timeout_s) {
  const Blocking blocking;
  return rendezvous::TcpStore::connect(host, port, key, Deadline(nanoseconds(timeout_s)),
                                       {.log = &log, .interrupted = &interrupted});
}

// (action, operation or "", bytes, peer or -1, seconds, chunk bytes, file), see pycomm.testing.
testing::Fault fault_from(const py::tuple& given) {
  const auto at = given[1].cast<std::string>();
  return {.action = find<testing::FaultAction>(testing::kFaultActions, given[0].cast<std::string>(),
                                               "kind of fault"),
          .operation =
              at.empty() ? -1 : static_cast<int>(find<Operation>(kOperations, at, "operation")),
          .after_bytes = given[2].cast<uint64_t>(),
          .peer = given[3].cast<int>(),
          .delay = nanoseconds(given[4].cast<double>()),
          .chunk_bytes = given[5].cast<size_t>(),
          .timestamp_file = given[6].cast<std::string>()};
}

// Makes the core use the same OpenSSL as Python, wherever it is stored.
void load_pythons_openssl() {
  try {
    py::module_::import("_hashlib");
  } catch (const py::error_already_set&) {  // Python has no OpenSSL: use the system's
  }
}

group::ConnectOptions options_from(const py::kwargs& named) {
  group::ConnectOptions options;
  options.rank = named["rank"].cast<int>();
  options.size = named["size"].cast<int>();
  options.name = named["name"].cast<std::string>();
  options.timeout = nanoseconds(named["timeout_s"].cast<double>());
  if (named.contains("heartbeat_s"))
    options.heartbeat = nanoseconds(named["heartbeat_s"].cast<double>());
  options.secret = named["secret"].cast<std::string>();
  options.transport = named["transport"].cast<std::string>();
  options.address = named["address"].cast<std::string>();
  if (named.contains("host")) options.host = named["host"].cast<std::string>();
  options.towards = named["route_hint"].cast<std::string>();
  options.reproducible = named["reproducible"].cast<bool>();
  if (named.contains("thread_multiple"))
    options.thread_multiple = named["thread_multiple"].cast<bool>();
  if (named.contains("full_mesh")) options.full_mesh = named["full_mesh"].cast<int>();
  if (named.contains("encrypt")) options.encrypt = named["encrypt"].cast<bool>();
  if (options.encrypt) load_pythons_openssl();
  if (named.contains("flight")) options.recorder.record = named["flight"].cast<std::string>();
  if (named.contains("trace")) options.recorder.trace = named["trace"].cast<std::string>();
  if (named.contains("faults")) {
    std::vector<testing::Fault> faults;
    for (const auto& fault : named["faults"]) faults.push_back(fault_from(fault.cast<py::tuple>()));
    if (!faults.empty()) options.wrap.inject_faults = testing::fault_injector(faults);
  }
  if (named.contains("link_bytes_per_s"))
    if (const auto speed = named["link_bytes_per_s"].cast<double>(); speed > 0)
      options.wrap.limit_rate = testing::rate_limiter(speed);
  if (named.contains("tuned"))
    for (const auto& one : named["tuned"]) {
      const auto [transport, small_bytes, middle_bytes] =
          one.cast<std::tuple<std::string, size_t, size_t>>();
      options.tuned.push_back({transport, {small_bytes, middle_bytes}});
    }
  options.interrupted = &interrupted;
  if (named["log"].cast<bool>()) options.log = &log;
  return options;
}

std::unique_ptr<GroupHandle> connect_from(const py::object& object, const py::kwargs& named) {
  group::ConnectOptions options = options_from(named);
  std::vector<int> ranks;
  if (named.contains("ranks")) ranks = named["ranks"].cast<std::vector<int>>();
  PythonStore adapter(object);
  rendezvous::Store& store =
      py::isinstance<rendezvous::Store>(object) ? object.cast<rendezvous::Store&>() : adapter;
  std::shared_ptr<group::Group> group;
  group::Group* parent = nullptr;
  if (named.contains("parent") && !named["parent"].is_none())
    parent = &named["parent"].cast<const GroupHandle&>().group();
  if (parent != nullptr) options.parent_ranks = std::exchange(ranks, {});
  {
    const Blocking blocking;
    group = parent != nullptr ? parent->connect_part(store, std::move(options))
                              : group::connect(store, std::move(options), std::move(ranks));
  }
  auto handle = std::make_unique<GroupHandle>(std::move(group));
  throw_pending();
  return handle;
}

std::unique_ptr<GroupHandle> regroup(const GroupHandle& broken, const py::object& object,
                                     const std::string& name, int rank, std::vector<int> ranks,
                                     double timeout_s) {
  PythonStore adapter(object);
  rendezvous::Store& store =
      py::isinstance<rendezvous::Store>(object) ? object.cast<rendezvous::Store&>() : adapter;
  std::shared_ptr<group::Group> part;
  {
    group::Group& group = broken.group();
    const auto limit = nanoseconds(timeout_s);
    const Blocking blocking;
    part = group.regroup(store, name, rank, std::move(ranks), limit);
  }
  auto handle = std::make_unique<GroupHandle>(std::move(part));
  throw_pending();
  return handle;
}

void set(rendezvous::Store& store, const std::string& key, const py::bytes& value,
         double timeout_s) {
  const Deadline deadline(nanoseconds(timeout_s));
  const std::string copy = value;
  const Blocking blocking;
  store.set(key, copy, deadline);
}

py::bytes get(rendezvous::Store& store, const std::string& key, double timeout_s) {
  const Deadline deadline(nanoseconds(timeout_s));
  std::string value;
  {
    const Blocking blocking;
    value = rendezvous::get_in_slices(store, key, deadline, &interrupted);
  }
  return value;
}

int64_t add(rendezvous::Store& store, const std::string& key, int64_t amount, double timeout_s) {
  const Deadline deadline(nanoseconds(timeout_s));
  const Blocking blocking;
  return store.add(key, amount, deadline);
}

py::object remove(rendezvous::Store& store, const std::string& key, double timeout_s) {
  const Deadline deadline(nanoseconds(timeout_s));
  std::optional<std::string> value;
  {
    const Blocking blocking;
    value = store.remove(key, deadline);
  }
  return value ? py::object(py::bytes(*value)) : py::none();
}

py::bytes claim(rendezvous::Store& store, const std::string& key, const py::bytes& value,
                double timeout_s) {
  const Deadline deadline(nanoseconds(timeout_s));
  const std::string copy = value;
  std::string held;
  {
    const Blocking blocking;
    held = store.claim(key, copy, deadline);
  }
  return held;
}

void all_ranks_connected(rendezvous::Store& store) {
  const Blocking blocking;
  store.all_ranks_connected();
}

}  // namespace

void bind_stores(py::module_& module) {
  const double limit_s = rendezvous::store_limit().limit_s();
  py::class_<rendezvous::Store>(module, "Store")
      .def("set", &set, py::arg(), py::arg(), py::arg() = limit_s)
      .def("get", &get)
      .def("add", &add, py::arg(), py::arg(), py::arg() = limit_s)
      .def("remove", &remove, py::arg(), py::arg() = limit_s)
      .def("claim", &claim, py::arg(), py::arg(), py::arg() = limit_s)
      .def("all_ranks_connected", &all_ranks_connected);
  py::class_<rendezvous::LocalStore, rendezvous::Store>(module, "LocalStore").def(py::init<>());
  py::class_<rendezvous::TcpStore, rendezvous::Store>(module, "TcpStore")
      .def_static("serve", &serve)
      .def_static("connect", &connect_store)
      .def_property_readonly("port", &rendezvous::TcpStore::port);
  module.def("connect", &connect_from);
  module.def("regroup", &regroup);
  module.def("check_address", &group::check_address);
}

}  // namespace pycomm::bindings
