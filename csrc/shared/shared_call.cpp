#include "shared/shared_call.h"

#include <utility>

namespace pycomm::shared {

SharedCall::SharedCall(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job)
    : engine_(engine), region_(region), job_(job) {
  if (BufferExchange::applies_to(job, region)) {
    now_ = &tasks_.emplace<BufferExchange>(engine, region, job);
  } else {
    now_ = &tasks_.emplace<StagedTask>(engine, region, job);
    mode_ = AccessMode::staged;
  }
}

// Peers may read or write this rank's arrays, even before this rank has completed the exchange: the
// peers may have completed it.
SharedCall::~SharedCall() {
  if (mode_ != AccessMode::staged && !done()) region_.abort_call();
}

bool SharedCall::advance() {
  if (!now_->advance()) return false;
  if (const auto* exchange = std::get_if<BufferExchange>(&tasks_);
      exchange != nullptr && exchange->done())
    now_ = begin(*exchange);
  return true;
}

engine::Task* SharedCall::begin(const BufferExchange& exchange) {
  mode_ = exchange.access_mode();
  if (mode_ == AccessMode::staged) return &tasks_.emplace<StagedTask>(engine_, region_, job_);
  std::vector<RemoteBuffer> buffers = exchange.buffers();  // emplace() destroys the exchange
  return &tasks_.emplace<ZeroCopyTask>(engine_, region_, job_, std::move(buffers));
}

}  // namespace pycomm::shared
