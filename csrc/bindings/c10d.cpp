// The torch.distributed backend: c10d::Backend on top of a pycomm::Group, and its Python module
// _c10d.
//
// Here and in the c10d_*.h beside it stands all the torch there is in C++. Of ours only
// group/group.h is seen, and nothing of ours is linked: the group comes from the module _core in a
// capsule. Synchronous calls run on the caller's thread; asynchronous ones on the engine's worker.
#include <ATen/record_function.h>
#include <pthread.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "bindings/c10d_tensors.h"
#include "bindings/c10d_verbs.h"
#include "bindings/c10d_work.h"
#include "group/group.h"

namespace pycomm::bindings {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
constexpr const char* kName = "pycomm";

std::atomic<unsigned> fork_count{0};

// Frees the GIL, if this thread has it: goodbyes may wait, and the worker may need it to say its
// own.
template <typename Body>
void without_gil(const Body& body) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return body();
  const py::gil_scoped_release release;
  body();
}

// The groups that backends own, for the end of the interpreter.
class OpenGroups {
 public:
  void add(const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& old) { return old.expired(); });
    groups_.push_back(group);
  }
  void close_all() {
    const std::lock_guard lock(mutex_);
    for (const auto& weak : groups_)
      if (const auto group = weak.lock()) group->close();
    groups_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> groups_;
};
OpenGroups open_groups;

class Options : public c10d::Backend::Options {
 public:
  explicit Options(milliseconds timeout) : c10d::Backend::Options(kName, timeout) {}
};

class Backend : public c10d::Backend {
 public:
  // `owner`: the group ends with this backend, which calls `ended` then. Else somebody else closes
  // it.
  Backend(std::shared_ptr<Group> group, c10::intrusive_ptr<Options> options, bool owner,
          std::function<void()> ended)
      : c10d::Backend(group->rank(), group->size()),
        group_(std::move(group)),
        options_(std::move(options)),
        owner_(owner),
        ended_(std::move(ended)),
        born_(fork_count) {
    if (owner_) open_groups.add(group_);
  }

  ~Backend() override {
    shutdown();
    without_gil([this] { group_.reset(); });
  }

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return *error_; }
  Stats stats() const { return group_->stats(); }

  // Of torch's calls. The group's own, of which there may be another user, stays as it is.
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }

  void abort() override {
    if (born_ == fork_count)
      without_gil([this] { group_->abort("rank " + std::to_string(rank_) + " called abort()"); });
  }

  // In a forked child the group is the parent's, and so is its end.
  void shutdown() override {
    if (!owner_ || born_ != fork_count) return;
    without_gil([this] { group_->close(); });
    if (const auto ended = std::exchange(ended_, nullptr); ended && Py_IsInitialized() != 0)
      ended();
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return submit(opts, [&] {
      Job job = all_reduce(tensors, opts.reduceOp, c10d::OpType::ALLREDUCE);
      only(job, tensors);
      return job;
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return submit(opts, [&] {
      return all_reduce(tensors, opts.reduceOp, c10d::OpType::ALLREDUCE_COALESCED);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return submit(opts, [&] { return bindings::reduce(seat(), tensors, opts); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return submit(opts, [&] { return bindings::broadcast(seat(), tensors, opts); });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] { return all_gather(seat(), outputs, inputs); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] { return all_gather_lists(seat(), outputs, inputs); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] {
      return all_gather_into(seat(), {output}, {input}, c10d::OpType::_ALLGATHER_BASE);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] {
      return all_gather_into(seat(), outputs, inputs, c10d::OpType::ALLGATHER_COALESCED);
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return submit(opts,
                  [&] { return bindings::reduce_scatter(seat(), outputs, inputs, opts.reduceOp); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return submit(opts, [&] {
      return reduce_scatter_from(seat(), {output}, {input}, opts.reduceOp,
                                 c10d::OpType::_REDUCE_SCATTER_BASE);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return submit(opts, [&] {
      return reduce_scatter_from(seat(), outputs, inputs, opts.reduceOp,
                                 c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED);
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    return submit(opts, [&] { return bindings::gather(seat(), outputs, inputs, opts); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return submit(opts, [&] { return bindings::scatter(seat(), outputs, inputs, opts); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return submit(opts,
                  [&] { return all_to_all(seat(), outputs, inputs, c10d::OpType::ALLTOALL); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    return submit(
        opts, [&] { return all_to_all_rows(seat(), output, input, output_splits, input_splits); });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return submit(c10d::AllreduceOptions{}, [&] { return bindings::send(tensors, peer, tag); });
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return submit(c10d::AllreduceOptions{}, [&] { return bindings::recv(tensors, peer, tag); });
  }
  WorkPtr recvAnysource(Tensors&, int) override { return lacks("recv from any source"); }
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    return lacks("all_reduce of sparse tensors");
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return submit(opts, [] {
      Job job{.type = c10d::OpType::BARRIER, .title = "pycomm:barrier"};
      job.calls.push_back({.operation = Operation::barrier});
      return job;
    });
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) override {
    c10d::BarrierOptions now = opts;
    now.asyncOp = false;
    barrier(now);
  }

  void startCoalescing() override {
    batch_ = Job{.type = c10d::OpType::COALESCED, .title = "pycomm:coalesced"};
  }
  WorkPtr endCoalescing() override {
    if (!batch_) return lacks("end of coalescing without its start");
    Job job = *std::exchange(batch_, std::nullopt);
    const bool transfers = std::all_of(job.calls.begin(), job.calls.end(), [](const Call& call) {
      return call.operation == Operation::send || call.operation == Operation::recv;
    });
    if (transfers) sort_transfers(job.calls, rank_);
    return with_python_errors([&] { return start(std::move(job)); });
  }

 private:
  Seat seat() const { return {rank_, size_}; }

  [[noreturn]] static WorkPtr lacks(const std::string& what) {
    throw as_python(std::make_exception_ptr(Unsupported("pycomm does not have " + what)));
  }

  // Makes the job and does it: now, if the caller waits anyway; else on the worker. A null Work is
  // what torch takes for "over"; it gets a real one where a profiler wants to see it.
  template <typename Opts, typename Make>
  WorkPtr submit(const Opts& opts, const Make& make) {
    return with_python_errors([&]() -> WorkPtr {
      if (born_ != fork_count)
        throw GroupBroken(
            "this process was forked off after the group formed, and the group stays with the "
            "parent; start processes with spawn, or call init_process_group() in each");
      Job job = make();
      for (auto& call : job.calls)
        call.timeout = opts.timeout > kNoTimeout ? opts.timeout : options_->timeout;
      if (batch_) return add_to_batch(std::move(job));
      if (opts.asyncOp) return start(std::move(job));
      ++sequence_;
      if (at::hasCallbacks()) return run_profiled(std::move(job));
      run(job);
      return {};
    });
  }

  void run(Job& job) {
    try {
      for (const auto& call : job.calls) group_->run(call);
    } catch (...) {
      note(*error_, std::current_exception());
      throw;
    }
    EngineWork::copy_back(job);
  }

  WorkPtr run_profiled(Job job) {
    auto work = c10::make_intrusive<EngineWork>(rank_, sequence_, Job(job));
    try {
      run(job);
    } catch (...) {
      work->land(job.calls.size(), std::current_exception());
      throw;
    }
    if (!job.calls.empty()) work->land(job.calls.size(), nullptr);
    return work;
  }

  WorkPtr start(Job job) {
    auto work = c10::make_intrusive<EngineWork>(rank_, ++sequence_, std::move(job));
    const size_t count = work->job().calls.size();
    for (size_t i = 0; i < count; ++i) {
      try {
        group_->start(work->job().calls[i],
                      [work, error = error_](const std::exception_ptr& thrown) {
                        note(*error, thrown);
                        work->land(1, thrown);
                      });
      } catch (...) {  // those that started before still use the job's memory
        work->land(count - i, std::current_exception());
        if (i == 0) throw;
        break;
      }
    }
    return work;
  }

  WorkPtr add_to_batch(Job job) {
    const auto append = [](auto& to, auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(batch_->inputs, job.inputs);
    append(batch_->outputs, job.outputs);
    append(batch_->calls, job.calls);
    append(batch_->held, job.held);
    append(batch_->copies, job.copies);
    return {};
  }

  // What get_error() says: the first failure that broke the group.
  static void note(std::atomic<c10d::ErrorType>& said, const std::exception_ptr& thrown) {
    if (!thrown || said != c10d::ErrorType::SUCCESS) return;
    try {
      std::rethrow_exception(thrown);
    } catch (const Timeout&) {
      said = c10d::ErrorType::TIMEOUT;
    } catch (const PeerLost&) {
      said = c10d::ErrorType::REMOTE_ERROR;
    } catch (const GroupBroken&) {
      said = c10d::ErrorType::COMM_ERROR;
    } catch (...) {  // the caller's mistake: the group stands
    }
  }

  std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<Options> options_;
  const bool owner_;
  std::function<void()> ended_;
  const unsigned born_;
  std::atomic<uint64_t> sequence_{0};
  const std::shared_ptr<std::atomic<c10d::ErrorType>> error_ =
      std::make_shared<std::atomic<c10d::ErrorType>>(c10d::ErrorType::SUCCESS);
  std::optional<Job> batch_;
};

// Takes the group out of the capsule that _core.Group._capsule() gives.
c10::intrusive_ptr<Backend> backend_from(const py::capsule& capsule,
                                         const c10::intrusive_ptr<Options>& options, bool owner,
                                         std::function<void()> ended) {
  if (std::string_view(capsule.name()) != "pycomm.Group")
    throw py::type_error("a capsule of pycomm._core.Group is needed");
  return c10::make_intrusive<Backend>(*capsule.get_pointer<std::shared_ptr<Group>>(), options,
                                      owner, std::move(ended));
}

py::dict stats(const Backend& backend) {
  const Stats now = backend.stats();
  using namespace pybind11::literals;
  return py::dict("calls"_a = now.calls, "frames_sent"_a = now.frames_sent,
                  "bytes_sent"_a = now.bytes_sent, "bytes_written"_a = now.bytes_written,
                  "bytes_received"_a = now.bytes_received, "seconds"_a = now.seconds);
}

}  // namespace
}  // namespace pycomm::bindings

PYBIND11_MODULE(_c10d, module) {
  using namespace pycomm::bindings;
  module.doc() = "pycomm for torch.distributed. Private: use pycomm.torch_backend.";
  module.attr("torch_version") = PYCOMM_TORCH_VERSION;
  pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
  py::module_::import("torch.distributed");  // the base classes

  module.def("close_all", [born = fork_count.load()] {
    if (born == fork_count) without_gil([] { open_groups.close_all(); });
  });
  const auto copy = [](const Options& options) { return c10::make_intrusive<Options>(options); };
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(module, "Options")
      .def(py::init<milliseconds>(), py::arg("timeout") = milliseconds(kBackendDefaultTimeout))
      .def("__copy__", copy)
      .def("__deepcopy__",
           [copy](const Options& options, const py::dict&) { return copy(options); });
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def(py::init(&backend_from), py::arg("capsule"), py::arg("options"), py::arg("owner"),
           py::arg("ended") = py::none())
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("get_error", &Backend::getError)
      .def("stats", &stats);
}
