// pycomm::Group as a c10d::Backend: the methods that torch calls.
//
// Synchronous calls run on the caller's thread, asynchronous ones on the group's worker.
// c10d_verbs.h maps torch's verbs to calls; c10d_work.h reports their completion.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c10d_devices.h"
#include "bindings/c10d_exchange.h"
#include "bindings/c10d_host_copies.h"
#include "bindings/c10d_monitor.h"
#include "bindings/c10d_open_groups.h"
#include "bindings/c10d_options.h"
#include "bindings/c10d_overlap.h"
#include "bindings/c10d_python.h"
#include "bindings/c10d_sparse.h"
#include "bindings/c10d_tensors.h"
#include "bindings/c10d_verbs.h"
#include "bindings/c10d_work.h"
#include "group/group.h"

namespace pycomm::bindings {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Backend : public c10d::Backend {
 public:
  // `owner`: this backend closes the group, then calls `ended`. Otherwise the caller closes it. The
  // ranks met in `store`.
  Backend(std::shared_ptr<group::Group> group, c10::intrusive_ptr<c10d::Store> store,
          c10::intrusive_ptr<bindings::Options> options, bool owner, std::function<void()> ended)
      : c10d::Backend(group->rank(), group->size()),
        group_(std::move(group)),
        store_(std::move(store)),
        options_(std::move(options)),
        owner_(owner),
        ended_(std::move(ended)),
        forks_at_creation_(fork_count) {
    if (owner_) open_groups.add(group_);
  }

  ~Backend() override {
    shutdown();
    if (forks_at_creation_ != fork_count) {  // the parent owns the sockets: send no goodbye on them
      [[maybe_unused]] auto* leaked = new std::pair(std::move(group_), device_states_.take());
      return;
    }
    without_gil([this] {
      (void)device_states_.take();
      group_.reset();
    });
  }

  const std::string getBackendName() const override { return kName; }
  // A copy, because torch writes the name and timeout of a split or merged group into it.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_->clone();
  }
  const c10::intrusive_ptr<bindings::Options>& options() const { return options_; }
  const std::shared_ptr<group::Group>& group() const { return group_; }
  // torch keeps one batch for all threads of a group.
  bool supportsCoalescing() const override { return !group_->info().thread_multiple; }
  bool supportsSplitting() const override { return true; }
  bool supportsShrinking() const override { return true; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  // In shared memory if the ranks share any, for buckets of torch's DistributedDataParallel.
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
    completions_.release();
    return error_->type(device_states_.any_broken());
  }
  // From torch 2.14 on (supportsAbortHooks: 2.15) these override: the hooks run when a call finds
  // that the group broke, before it raises.
  bool supportsAbortHooks() const { return true; }
  void registerAbortHook(int64_t id, std::function<void()> hook) {
    error_->set_hook(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) { error_->remove_hook(id); }
  group::Stats stats() const { return device_states_.with_traffic(group_->stats()); }
  void eagerConnectSingleDevice(at::Device device) override {
    if (!HostCopies::needed(device, *options_, device_states_))
      with_python_errors([&] { device_state(device).form(options_->timeout); });
  }
  // The timeout of torch's calls. The group's own timeout is unchanged, as it may have other users.
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }

  void abort() override {
    if (forks_at_creation_ == fork_count)
      without_gil([this] {
        const std::string reason = "rank " + std::to_string(rank_) + " called abort()";
        for (const auto& used : device_states_.used()) used.group->abort(reason);
        group_->abort(reason);
      });
  }

  void shutdown() override {
    if (forks_at_creation_ != fork_count) return;
    without_gil([this] {
      for (const auto& used : device_states_.used()) used.group->close();
      if (owner_) group_->close();
    });
    if (const auto ended = std::exchange(ended_, nullptr); ended && Py_IsInitialized() != 0)
      ended();
  }

  // Collective over this group. Ranks in `ranks` get a backend of their own, the others null. torch
  // calls it for each device type of the backend, with one store: members once or, before 2.14,
  // each time, and other ranks each time. A repeated call returns the result of the first.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override {
    return with_python_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
      check_process();
      const auto theirs = c10::dynamic_intrusive_pointer_cast<bindings::Options>(opts);
      if (!theirs || ranks.empty())
        throw InvalidArgument(
            "split requires a list of ranks, and options made by pycomm.torch_backend");
      const auto place = std::find(ranks.begin(), ranks.end(), rank_);
      if (last_split_ && last_split_->store.lock() == store) {
        auto made = last_split_->made.lock();
        if (made || place == ranks.end()) return made;
      }
      const int color = place == ranks.end() ? -1 : *std::min_element(ranks.begin(), ranks.end());
      std::shared_ptr<group::Group> part;
      without_gil([&] { part = group_->split(color, static_cast<int>(place - ranks.begin())); });
      c10::intrusive_ptr<Backend> made;
      if (part) {
        auto ended = attach(part, theirs->timeout);
        made = c10::make_intrusive<Backend>(std::move(part), store,
                                            c10::make_intrusive<bindings::Options>(*theirs), true,
                                            std::move(ended));
      }
      last_split_.emplace(Split{c10::weak_intrusive_ptr<c10d::Store>(store),
                                c10::weak_intrusive_ptr<c10d::Backend>(made)});
      return made;
    });
  }

  // Collective over the ranks that use `store`, from any groups. Returns a backend of their own,
  // whose options are a copy of this one's with the new group's name and timeout.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override {
    return with_python_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
      check_process();
      return merged<c10::intrusive_ptr<Backend>>(store, opts, rank, size);
    });
  }

  // Collective over the other ranks, whose order stays. The group may be broken; torch closes it.
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& override) override {
    check_process();
    if (flags != 0) abort();  // NCCL's NCCL_SHRINK_ABORT
    return shrunk<c10::intrusive_ptr<Backend>>(group_, store_, ranks_to_exclude,
                                               override ? override : options_->clone());
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
    return submit(opts, [&] { return bindings::reduce(slot(), tensors, opts); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return submit(opts, [&] { return bindings::broadcast(slot(), tensors, opts); });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] { return all_gather(slot(), outputs, inputs); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] { return all_gather_lists(slot(), outputs, inputs); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] {
      return all_gather_into(slot(), {output}, {input}, c10d::OpType::_ALLGATHER_BASE);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return submit(opts, [&] {
      return all_gather_into(slot(), outputs, inputs, c10d::OpType::ALLGATHER_COALESCED);
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return submit(opts,
                  [&] { return bindings::reduce_scatter(slot(), outputs, inputs, opts.reduceOp); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return submit(opts, [&] {
      return reduce_scatter_from(slot(), {output}, {input}, opts.reduceOp,
                                 c10d::OpType::_REDUCE_SCATTER_BASE);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return submit(opts, [&] {
      return reduce_scatter_from(slot(), outputs, inputs, opts.reduceOp,
                                 reduce_scatter_coalesced_type());
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    return submit(opts, [&] { return gather_lists(slot(), outputs, inputs, opts); });
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.14, which forwards the other _single names itself
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& opts) override {
    return submit(opts, [&] { return gather_into(slot(), output, input, opts); });
  }
#endif
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return submit(opts, [&] { return bindings::scatter(slot(), outputs, inputs, opts); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return submit(opts, [&] { return all_to_all(slot(), outputs, inputs); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    return submit(
        opts, [&] { return all_to_all_rows(slot(), output, input, output_splits, input_splits); });
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
    return submit(opts, [&] { return all_reduce_sparse(slot(), tensors, opts); });
  }

  // Without async_op it first waits for this rank's current streams, so that afterwards all ranks'
  // work before the barrier is complete.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    if (!opts.asyncOp) with_python_errors([&] { finish_streams(opts.timeout); });
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
      recording_errors([&] { MonitoredBarrier(*group_, limit, wait_all_ranks).run(); });
    });
  }

  void startCoalescing() override {
    batch_ = Job{.type = c10d::OpType::COALESCED, .title = "pycomm:coalesced"};
    batch_uses_.clear();
  }
  // After an error in the body of torch's coalescing manager: nothing of the batch was started.
  void abandon_coalescing() { batch_.reset(); }
  WorkPtr endCoalescing() override {
    return with_python_errors([&] {
      if (!batch_) throw InvalidArgument("pycomm: end of coalescing without a start");
      Job job = *std::exchange(batch_, std::nullopt);
      std::vector<Use> uses = std::exchange(batch_uses_, {});
      if (is_transfer(job)) {
        separate_receives(job, uses);
        sort_transfers(job.calls, rank_);
      }
      check_no_overlap(job, uses);
      return start(std::move(job));
    });
  }

 protected:  // ReconfigurableBackend replaces the group
  RankSlot slot() const { return {rank_, size_}; }

  void check_process() const {
    if (forks_at_creation_ != fork_count)
      throw GroupBroken(
          "this process was forked after the group formed, and the group belongs to the "
          "parent; start processes with spawn, or call init_process_group() in each");
  }

  // The profiler's title of a call: programs look for the backend that they asked for.
  std::string title_of(const Job& job) const {
    return options_->replaces.empty() ? job.title : options_->replaces + ":" + job.verb();
  }

  // Makes the job and runs it: on this thread if the call is synchronous, otherwise on the worker.
  // A null Work means "complete" to torch; a profiler needs a real one.
  template <typename Opts, typename Make>
  WorkPtr submit(const Opts& opts, const Make& make) {
    return with_python_errors([&]() -> WorkPtr {
      check_process();
      Job job = make();
      HostCopies::take_over_if_needed(job, *options_, device_states_);
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
  void recording_errors(const Body& body) {
    try {
      body();
    } catch (...) {
      error_->record(std::current_exception());
      throw;
    }
  }

  // For a job on a device: sets the streams of its calls and returns the device's group.
  DeviceState* set_streams(Job& job) {
    if (!job.device || job.device->is_cpu()) return nullptr;
    DeviceState& state = device_state(*job.device);
    if (!job.calls.empty() && !is_transfer(job)) state.form(job.calls.front().timeout);
    void* const stream = current_stream(*job.device).native_handle();
    for (group::Call& call : job.calls) call.device.stream = stream;
    return &state;
  }

  // Waits for the current streams of all devices that this backend used.
  void finish_streams(milliseconds timeout) {
    check_process();
    const milliseconds limit = timeout > kNoTimeout ? timeout : options_->timeout;
    for (const auto& [device, group] : device_states_.used()) {
      DeviceCompletion earlier(current_stream(device), group->make_event());
      earlier.record();
      if (!wait_for_device(earlier, limit, std::chrono::steady_clock::now()))
        throw Timeout("pycomm barrier: earlier work on " + device.str() +
                          " did not complete within " + std::to_string(limit.count()) + " ms",
                      {.op = "barrier", .rank = rank_});
    }
  }

  DeviceState& device_state(c10::Device device) {
    if (DeviceState* const found = device_states_.find(device)) return *found;
    DeviceState made = make_device_state(group_, device, options_->devices, options_->timeout);
    open_groups.add(made.group);
    return device_states_.add(device, std::move(made));
  }

  void run(Job& job) {
    DeviceState* const state = set_streams(job);
    recording_errors([&] {
      for (const auto& call : job.calls) (state ? state->group : group_)->run(call);
      if (job.after) job.after(*group_, job.calls.front().timeout);
    });
    EngineWork::copy_back(job);
  }

  WorkPtr run_profiled(Job job) {
    std::shared_ptr<DeviceCompletion> completion;
    if (DeviceState* const state = set_streams(job))
      completion = std::make_shared<DeviceCompletion>(current_stream(*job.device),
                                                      state->group->make_event());
    auto work = c10::make_intrusive<EngineWork>(rank_, sequence_, Job(job), title_of(job),
                                                std::move(completion));
    try {
      run(job);
    } catch (...) {
      work->complete_calls(job.calls.size(), std::current_exception());
      throw;
    }
    if (!job.calls.empty()) work->complete_calls(job.calls.size(), nullptr);
    return work;
  }

  WorkPtr start(Job job) {
    DeviceState* const state = set_streams(job);
    std::shared_ptr<DeviceCompletion> completion;
    if (state) {
      completion =
          std::make_shared<DeviceCompletion>(state->completion, state->group->make_event());
      for (group::Call& call : job.calls) call.device.follower = state->completion.native_handle();
    }
    const std::string title = title_of(job);
    auto work =
        c10::make_intrusive<EngineWork>(rank_, ++sequence_, std::move(job), title, completion);
    size_t count = work->job().calls.size();
    if (state && count > 1 && is_transfer(work->job())) {
      completion->add(start_messages(*state->group, work, error_));
      count = 0;  // of those that are left
    }
    std::shared_ptr<group::Work> receive;
    for (size_t i = 0; i < count; ++i) {
      try {
        auto completed = [work, error = error_, group = group_.get()](std::exception_ptr thrown) {
          if (!thrown) thrown = work->follow(*group);
          error->record(thrown);
          work->complete_calls(1, thrown);
        };
        auto call =
            (state ? state->group : group_)->start(work->job().calls[i], std::move(completed));
        if (completion)
          completion->add(std::move(call));
        else if (work->job().calls[i].operation == Operation::recv)
          receive = std::move(call);
      } catch (...) {  // earlier calls still use the job's memory
        work->complete_calls(count - i, std::current_exception());
        if (i == 0) throw;
        break;
      }
    }
    if (receive) work->set_receive(std::move(receive));
    if (completion) completions_.add(std::move(completion));
    return work;
  }

  WorkPtr add_to_batch(Job job) {
    if (job.after || job.source) job.throw_unsupported("cannot be coalesced");
    if (!batch_->device) batch_->device = job.device;
    if (job.device && *job.device != *batch_->device)
      job.throw_invalid("coalesced calls on " + batch_->device->str() + " and " +
                        job.device->str());
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

  struct Split {
    c10::weak_intrusive_ptr<c10d::Store> store;
    c10::weak_intrusive_ptr<c10d::Backend> made;
  };

  std::shared_ptr<group::Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::optional<Split> last_split_;
  DeviceStates device_states_;
  const c10::intrusive_ptr<bindings::Options> options_;
  const bool owner_;
  std::function<void()> ended_;
  const unsigned forks_at_creation_;
  std::atomic<uint64_t> sequence_{0};
  const std::shared_ptr<BreakingError> error_ = std::make_shared<BreakingError>();
  std::optional<Job> batch_;
  std::vector<Use> batch_uses_;  // what the calls of the batch read and write
  size_t batch_size_ = 0;        // numbers the calls in batch_uses_
  DeviceCompletions completions_{
      [error = error_](const std::exception_ptr& thrown) { error->record(thrown); }};
};

}  // namespace pycomm::bindings
