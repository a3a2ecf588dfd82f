// pycomm::Group as a c10d::Backend: what torch calls when a program calls a verb.
//
// Synchronous calls run on the caller's thread; asynchronous ones on the engine's worker. What a
// verb means stands in c10d_verbs.h, how its end is told in c10d_work.h. Included by c10d.cpp only.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/c10d_devices.h"
#include "bindings/c10d_exchange.h"
#include "bindings/c10d_monitor.h"
#include "bindings/c10d_open_groups.h"
#include "bindings/c10d_overlap.h"
#include "bindings/c10d_python.h"
#include "bindings/c10d_sparse.h"
#include "bindings/c10d_tensors.h"
#include "bindings/c10d_verbs.h"
#include "bindings/c10d_work.h"
#include "group/group.h"

namespace pycomm::bindings {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
inline constexpr const char* kName = "pycomm";

class Options : public c10d::Backend::Options {
 public:
  Options(milliseconds timeout, DeviceOptions on_devices, std::optional<bool> encrypted)
      : c10d::Backend::Options(kName, timeout),
        devices(std::move(on_devices)),
        encrypt(encrypted) {}
  DeviceOptions devices;
  std::optional<bool> encrypt;  // for Python, which connects the ranks; none: not said
};

class Backend : public c10d::Backend {
 public:
  // `owner`: the group ends with this backend, which calls `ended` then. Else somebody else closes
  // it.
  Backend(std::shared_ptr<Group> group, c10::intrusive_ptr<bindings::Options> options, bool owner,
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
    if (born_ != fork_count) {  // the group's sockets are the parent's: no goodbye on them
      [[maybe_unused]] auto* leaked = new std::pair(std::move(group_), std::move(sides_));
      return;
    }
    without_gil([this] {
      sides_.clear();
      group_.reset();
    });
  }

  const std::string getBackendName() const override { return kName; }
  // A copy: torch writes the name and the limit of a split or merged group into what this gives.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<bindings::Options>(*options_);
  }
  const c10::intrusive_ptr<bindings::Options>& options() const { return options_; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  // Where the ranks see it, if they can. torch's DistributedDataParallel can ask for its buckets.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (!options.device().is_cpu()) return at::empty({size}, options);
    const auto bytes = static_cast<size_t>(size) * options.dtype().itemsize();
    auto memory = bytes > 0 ? with_python_errors([&] { return group_->allocate(bytes); }) : nullptr;
    if (!memory) return at::empty({size}, options);
    void* const data = memory.get();
    return at::from_blob(data, {size}, [held = std::move(memory)](void*) {}, options);
  }
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override {
    sweep();
    return *error_;
  }
  // Calls on devices count where the ranks agree about them, which is in host memory.
  Stats stats() const {
    Stats all = group_->stats();
    for (const auto& [device, side] : sides_) {
      const Stats there = side.group->stats();
      all.frames_sent += there.frames_sent;
      all.bytes_sent += there.bytes_sent;
    }
    return all;
  }
  void eagerConnectSingleDevice(at::Device device) override {
    with_python_errors([&] { (void)side_on(device); });
  }

  // Of torch's calls. The group's own, of which there may be another user, stays as it is.
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }

  void abort() override {
    if (born_ == fork_count)
      without_gil([this] {
        const std::string reason = "rank " + std::to_string(rank_) + " called abort()";
        for (const auto& [device, side] : sides_) side.group->abort(reason);
        group_->abort(reason);
      });
  }

  // In a forked child the group is the parent's, and so is its end.
  void shutdown() override {
    if (born_ != fork_count) return;
    without_gil([this] {
      for (const auto& [device, side] : sides_) side.group->close();
      if (owner_) group_->close();
    });
    if (!owner_) return;
    if (const auto ended = std::exchange(ended_, nullptr); ended && Py_IsInitialized() != 0)
      ended();
  }

  // Collective over this group: those in `ranks` get a backend of their own, the others null.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override {
    return with_python_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
      check_process();
      const auto theirs = c10::dynamic_intrusive_pointer_cast<bindings::Options>(opts);
      if (!theirs || ranks.empty())
        throw InvalidArgument("split needs ranks, and options made by pycomm.torch_backend");
      const auto place = std::find(ranks.begin(), ranks.end(), rank_);
      const int color = place == ranks.end() ? -1 : *std::min_element(ranks.begin(), ranks.end());
      std::shared_ptr<Group> part;
      without_gil([&] { part = group_->split(color, static_cast<int>(place - ranks.begin())); });
      if (!part) return {};
      auto ended = attach(part, theirs->timeout);
      return c10::make_intrusive<Backend>(
          std::move(part), c10::make_intrusive<bindings::Options>(*theirs), true, std::move(ended));
    });
  }

  // Collective over the ranks that meet in `store`, of any groups: a backend of their own. The
  // options are a copy of this one's with the new group's name and limit.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override {
    return with_python_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
      check_process();
      return merged<c10::intrusive_ptr<Backend>>(store, opts, rank, size);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (!tensors.empty() && tensors.front().defined() && tensors.front().layout() != at::kStrided)
      return allreduce_sparse(tensors, opts);
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
    return submit(opts, [&] { return all_to_all(seat(), outputs, inputs); });
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
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return submit(c10d::AllreduceOptions{}, [&] { return recv_from_any(tensors, tag); });
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return submit(opts, [&] { return all_reduce_sparse(seat(), tensors, opts); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return submit(opts, [] {
      Job job{.type = c10d::OpType::BARRIER, .title = "pycomm:barrier"};
      job.calls.push_back({.operation = Operation::barrier});
      return job;
    });
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    with_python_errors([&] {
      check_process();
      ++sequence_;
      const milliseconds limit =
          opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
      noting([&] { MonitoredBarrier(*group_, limit, wait_all_ranks).run(); });
    });
  }

  void startCoalescing() override {
    batch_ = Job{.type = c10d::OpType::COALESCED, .title = "pycomm:coalesced"};
    batch_uses_.clear();
  }
  WorkPtr endCoalescing() override {
    if (!batch_)
      throw as_python(std::make_exception_ptr(
          InvalidArgument("pycomm: the end of coalescing without its start")));
    Job job = *std::exchange(batch_, std::nullopt);
    const std::vector<Use> uses = std::exchange(batch_uses_, {});
    const bool transfers = std::all_of(job.calls.begin(), job.calls.end(), [](const Call& call) {
      return call.operation == Operation::send || call.operation == Operation::recv;
    });
    if (transfers) sort_transfers(job.calls, rank_);
    return with_python_errors([&] {
      check_apart(job, uses);
      return start(std::move(job));
    });
  }

 private:
  RankSlot seat() const { return {rank_, size_}; }

  void check_process() const {
    if (born_ != fork_count)
      throw GroupBroken(
          "this process was forked off after the group formed, and the group stays with the "
          "parent; start processes with spawn, or call init_process_group() in each");
  }

  // Makes the job and does it: now, if the caller waits anyway; else on the worker. A null Work is
  // what torch takes for "over"; it gets a real one where a profiler wants to see it.
  template <typename Opts, typename Make>
  WorkPtr submit(const Opts& opts, const Make& make) {
    return with_python_errors([&]() -> WorkPtr {
      check_process();
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

  template <typename Body>
  void noting(const Body& body) {
    try {
      body();
    } catch (...) {
      note(*error_, std::current_exception());
      throw;
    }
  }

  // Of a job on a device: sets the streams of its calls, and gives the group there.
  DeviceSide* place(Job& job) {
    if (!job.device || job.device->is_cpu()) return nullptr;
    DeviceSide& side = side_on(*job.device);
    void* const stream = current_stream(*job.device).native_handle();
    for (Call& call : job.calls) call.stream = stream;
    return &side;
  }

  DeviceSide& side_on(c10::Device device) {
    const auto found = sides_.find(device);
    if (found != sides_.end()) return found->second;
    DeviceSide made = meet_on(group_, device, options_->devices, options_->timeout);
    open_groups.add(made.group);
    return sides_.emplace(device, std::move(made)).first->second;
  }

  void run(Job& job) {
    DeviceSide* const side = place(job);
    noting([&] {
      for (const auto& call : job.calls) (side ? side->group : group_)->run(call);
      if (job.after) job.after(*group_, job.calls.front().timeout);
    });
    EngineWork::copy_back(job);
  }

  WorkPtr run_profiled(Job job) {
    std::shared_ptr<Landing> landing;
    if (place(job) != nullptr) landing = std::make_shared<Landing>(current_stream(*job.device));
    auto work = c10::make_intrusive<EngineWork>(rank_, sequence_, Job(job), std::move(landing));
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
    DeviceSide* const side = place(job);
    std::shared_ptr<Landing> landing;
    if (side) {
      landing = std::make_shared<Landing>(side->landing);
      for (Call& call : job.calls) call.follower = side->landing.native_handle();
    }
    auto work = c10::make_intrusive<EngineWork>(rank_, ++sequence_, std::move(job), landing);
    const size_t count = work->job().calls.size();
    for (size_t i = 0; i < count; ++i) {
      try {
        auto call =
            (side ? side->group : group_)
                ->start(work->job().calls[i],
                        [work, error = error_, group = group_.get()](std::exception_ptr thrown) {
                          if (!thrown) thrown = work->follow(*group);
                          note(*error, thrown);
                          work->land(1, thrown);
                        });
        if (landing) landing->add(std::move(call));
      } catch (...) {  // those that started before still use the job's memory
        work->land(count - i, std::current_exception());
        if (i == 0) throw;
        break;
      }
    }
    if (landing && !landing->captured()) {
      sweep();
      const std::lock_guard lock(landings_mutex_);
      landings_.push_back(std::move(landing));
    }
    return work;
  }

  // Lets go of what the devices have passed, and notes what went wrong there.
  void sweep() {
    std::vector<std::shared_ptr<Landing>> over;  // dropped without the lock, as Python may be asked
    const std::lock_guard lock(landings_mutex_);
    for (; !landings_.empty(); landings_.pop_front()) {
      const auto error = landings_.front()->error();
      if (!error && !landings_.front()->passed()) return;
      note(*error_, error);
      over.push_back(std::move(landings_.front()));
    }
  }

  WorkPtr add_to_batch(Job job) {
    if (job.after || job.source) job.lacks("cannot be part of a coalesced call");
    if (!batch_->device) batch_->device = job.device;
    if (job.device && *job.device != *batch_->device)
      job.refuse("coalesced calls on " + batch_->device->str() + " and " + job.device->str());
    ++batch_size_;
    add_uses(batch_uses_, job, batch_size_);
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
    } catch (const Error& error) {
      said = said_of(error.kind());
    } catch (...) {  // torch's own, from the copies: the group stands
    }
  }

  // By the kind, as the classes of another module's exceptions are not ours to compare.
  static c10d::ErrorType said_of(ErrorKind kind) {
    switch (kind) {
      case ErrorKind::timeout:
        return c10d::ErrorType::TIMEOUT;
      case ErrorKind::peer_lost:
        return c10d::ErrorType::REMOTE_ERROR;
      case ErrorKind::group_broken:
      case ErrorKind::internal:
        return c10d::ErrorType::COMM_ERROR;
      case ErrorKind::invalid_argument:
      case ErrorKind::unsupported:
      case ErrorKind::mismatch:
        break;  // the caller's mistake: the group stands
    }
    return c10d::ErrorType::SUCCESS;
  }

  std::shared_ptr<Group> group_;
  std::unordered_map<c10::Device, DeviceSide> sides_;  // those that were met so far
  const c10::intrusive_ptr<bindings::Options> options_;
  const bool owner_;
  std::function<void()> ended_;
  const unsigned born_;
  std::atomic<uint64_t> sequence_{0};
  const std::shared_ptr<std::atomic<c10d::ErrorType>> error_ =
      std::make_shared<std::atomic<c10d::ErrorType>>(c10d::ErrorType::SUCCESS);
  std::optional<Job> batch_;
  std::vector<Use> batch_uses_;  // what the calls of the batch read and write
  size_t batch_size_ = 0;        // tells their memory apart
  std::mutex landings_mutex_;
  std::deque<std::shared_ptr<Landing>> landings_;  // of calls on devices, in the order of the calls
};

}  // namespace pycomm::bindings
