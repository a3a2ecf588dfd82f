#include "shared/shared_call.h"

#include <chrono>
#include <utility>

namespace pycomm::shared {
namespace {

size_t bytes_of(const SharedJob& job) { return job.count * job.element_bytes; }

}  // namespace

SharedCall::SharedCall(engine::Engine& engine, SharedMemoryRegion& region, const SharedJob& job,
                       const transport::Header& header)
    : engine_(engine), region_(region), job_(job), header_(header) {
  if (BufferExchange::applies_to(job, region)) {
    OnlineTuner& reads_remotely = region.read_tuner(job.operation, bytes_of(job));
    reads_remotely.advance_to(reads_remotely.turns);
    now_ = &tasks_.emplace<BufferExchange>(engine, region, job, header,
                                           reads_remotely.uses_second(reads_remotely.turns));
  } else {
    now_ = &tasks_.emplace<StagedTask>(engine, region, job, header);
    mode_ = AccessMode::staged;
  }
}

// Peers may read or write this rank's arrays, even before this rank has completed the exchange: the
// peers may have completed it.
SharedCall::~SharedCall() {
  if (mode_ != AccessMode::staged && !done()) region_.leave();
}

bool SharedCall::advance() {
  if (!now_->advance()) return false;
  if (const auto* exchange = std::get_if<BufferExchange>(&tasks_);
      exchange != nullptr && exchange->done())
    now_ = begin(*exchange);
  else if (measures_ && done())
    record_cost();
  return true;
}

// Only the lowest rank measures, because it chooses the mode.
engine::Task* SharedCall::begin(const BufferExchange& exchange) {
  mode_ = exchange.access_mode();
  if (exchange.can_read_remotely() && region_.is_warm()) {
    OnlineTuner& reads_remotely = region_.read_tuner(job_.operation, bytes_of(job_));
    turn_ = reads_remotely.turns++;
    measures_ = region_.rank() == 0;
    if (measures_) begun_ = Clock::now();
  }
  std::vector<RemoteBuffer> buffers = exchange.buffers();
  switch (exchange.access_mode()) {
    case AccessMode::zero_copy:
      return &tasks_.emplace<ZeroCopyTask>(engine_, region_, job_, header_, std::move(buffers));
    case AccessMode::remote_read:
      return &tasks_.emplace<RemoteReadTask>(engine_, region_, job_, header_, std::move(buffers));
    case AccessMode::staged:
      break;
  }
  return &tasks_.emplace<StagedTask>(engine_, region_, job_, header_);
}

void SharedCall::record_cost() {
  const std::chrono::duration<double, std::nano> spent = Clock::now() - begun_;
  const auto bytes = static_cast<double>(bytes_of(job_));
  region_.read_tuner(job_.operation, bytes_of(job_)).record_cost(turn_, spent.count() / bytes);
  measures_ = false;
}

}  // namespace pycomm::shared
