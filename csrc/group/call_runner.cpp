#include "group/call_runner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "group/check.h"
#include "shared/shared_call.h"

namespace pycomm::group {

CallRunner::CallRunner(engine::Engine& engine, const GroupInfo& info,
                       const collectives::Thresholds& thresholds,
                       std::unique_ptr<shared::SharedMemoryRegion> region, bool uses_hosts)
    : engine_(engine),
      info_(info),
      thresholds_(thresholds),
      plans_(info),
      region_(std::move(region)) {
  if (uses_hosts) hierarchical_.emplace(engine_, region_.get());
}

void CallRunner::check(const Call& call) const {
  if (call.algorithm == Algorithm::shared_memory && !shares_one_host() && info_.size > 1)
    throw Unsupported(
        "the algorithm shared_memory requires all ranks on one host, with connections "
        "that share memory",
        {.op = std::string(name_of(call.operation)), .rank = info_.rank});
}

Algorithm CallRunner::algorithm_for(const Call& call) const {
  if (call.device.agreement) return call.algorithm;
  if (!is_plan(call.operation)) return Algorithm::direct;
  if (info_.size == 1 && call.algorithm == Algorithm::shared_memory) return Algorithm::direct;
  if (call.algorithm != Algorithm::automatic) return call.algorithm;
  if (shares_one_host() && call.counts.empty()) return Algorithm::shared_memory;
  return collectives::choose({.operation = call.operation,
                              .dtype = call.dtype,
                              .op = call.op,
                              .size = info_.size,
                              .count = count_to_choose_by(call),
                              .reproducible = info_.reproducible,
                              .ragged = !call.counts.empty(),
                              .hosts = info_.host_count,
                              .thresholds = thresholds_});
}

void CallRunner::prepare(PreparedCall& prepared) const {
  const Call& call = prepared.call;
  prepared.algorithm = algorithm_for(call);
  const transport::Header signature = signature_of(call, prepared.algorithm);
  // Beside a collective of another thread, the position of the next one is not known.
  const bool beside = engine_.posted().enabled() && !is_plan(call.operation);
  prepared.job = {.header = beside ? signature : engine_.next_header(signature),
                  .input = static_cast<const std::byte*>(call.input),
                  .output = static_cast<std::byte*>(call.output),
                  .element_bytes = bytes_of(call.dtype),
                  .reducer = prepared.job.reducer,
                  .size = info_.size,
                  .operation = call.operation,
                  .count = call.count,
                  .root = call.peer,
                  .folds = is_half(call.dtype)};
}

void CallRunner::run(const PreparedCall& prepared) {
  const Call& call = prepared.call;
  if (prepared.agreed != nullptr)
    return engine_.messenger().agree(prepared.messages, *prepared.agreed, prepared.deadline);
  if (!prepared.messages.empty())
    return engine_.messenger().exchange(prepared.messages, prepared.progress, prepared.deadline);
  if (!is_plan(call.operation)) return run_message(prepared);
  if (call.device.agreement) return agree(prepared);
  if (prepared.algorithm == Algorithm::shared_memory)
    return run_shared(prepared.job, prepared.deadline);
  if (!call.counts.empty()) return run_counts(prepared);
  engine::Job job = prepared.job;
  if (hierarchical_ && prepared.algorithm == Algorithm::hierarchical &&
      call.operation == Operation::all_reduce)
    return hierarchical_->all_reduce(job, plans_.shape_of(call, info_.rank, call.count),
                                     prepared.deadline);

  const PlanCache::Planned* plan = &plans_.find(call, prepared.algorithm, call.count);
  const size_t block = plan->block;
  size_t planned = call.count, left = call.count;
  for (;;) {
    const size_t count = std::min(block, left);
    if (count != std::exchange(planned, count))
      plan = &plans_.find(call, prepared.algorithm, count);
    job.schedule = &plan->schedule;
    if (call.operation == Operation::reduce_scatter && count < call.count) {
      job.piece = count;
      job.stride = call.count;
    }
    engine::PlanTask task = begin_plan(job);
    engine_.run(task, job.header, prepared.deadline);
    left -= count;
    if (left == 0) return;
    job.header = engine_.next_header(job.header);
    if (job.input != nullptr) job.input += count * job.element_bytes;
    if (job.output != nullptr) job.output += count * job.element_bytes;
  }
}

void CallRunner::run_message(const PreparedCall& prepared) {
  const Call& call = prepared.call;
  const size_t bytes = call.device.agreement ? 0 : call.count * bytes_of(call.dtype);
  if (call.operation == Operation::recv) {
    const int source = engine_.messenger().receive(
        call.peer == kAnySource ? engine::kAnyPeer : call.peer, prepared.job.header,
        {static_cast<std::byte*>(call.output), bytes}, prepared.deadline);
    if (call.source != nullptr) *call.source = source;
  } else if (call.device.agreement) {
    engine_.messenger().announce_send(call.peer, prepared.job.header, prepared.deadline);
  } else {
    engine_.messenger().send(call.peer, prepared.job.header,
                             {static_cast<const std::byte*>(call.input), bytes}, prepared.deadline);
  }
}

void CallRunner::run_shared(const engine::Job& job, const Deadline& deadline) {
  publish(job.header);
  shared::SharedCall task(engine_, *region_, job);
  engine_.run(task, job.header, deadline);
}

// The caller runs the task.
engine::PlanTask CallRunner::begin_plan(const engine::Job& job) {
  publish(job.header);
  return engine_.plan_task(job);
}

void CallRunner::run_counts(const PreparedCall& prepared) {
  const Call& call = prepared.call;
  engine::Job job = prepared.job;
  if (call.operation == Operation::all_to_all) {
    if (info_.size > 1 && !call.counts_fit) {
      check_splits(prepared);
      job.header = engine_.next_header(job.header);
    }
    job.peer_counts = call.counts;
  }
  const engine::Schedule schedule = plans_.schedule_of(call, prepared.algorithm, 0);
  job.schedule = &schedule;
  engine::PlanTask task = begin_plan(job);
  engine_.run(task, job.header, prepared.deadline, job.peer_counts);
}

}  // namespace pycomm::group
