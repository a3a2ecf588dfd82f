// A call within one host. A larger call begins with a buffer exchange, which selects the access
// mode; a small one uses slots.
//
// The engine runs this task and handles waiting, deadlines and failures.
#pragma once

#include <optional>
#include <variant>

#include "shared/staged_task.h"
#include "shared/zero_copy_task.h"

namespace pycomm::shared {

class SharedCall final : public engine::Task {
 public:
  SharedCall(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job);
  ~SharedCall() override;
  SharedCall(const SharedCall&) = delete;
  SharedCall& operator=(const SharedCall&) = delete;

  bool advance() override;
  bool done() const override {
    return !std::holds_alternative<BufferExchange>(tasks_) && now_->done();
  }
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override { return now_->receiving_from(); }
  std::optional<bool> leave_processor_of_peer(os::ProcessorExclusion& exclusion) override {
    return now_->leave_processor_of_peer(exclusion);
  }
  void arm() override { now_->arm(); }
  void disarm() override { now_->disarm(); }

  // None before the buffer exchange is done.
  std::optional<AccessMode> access_mode() const { return mode_; }

 private:
  engine::Task* begin(const BufferExchange& exchange);

  engine::Engine& engine_;
  SharedMemoryRegion& region_;
  const engine::Job& job_;
  std::variant<std::monostate, BufferExchange, ZeroCopyTask, StagedTask> tasks_;
  engine::Task* now_;  // the active one
  std::optional<AccessMode> mode_;
};

}  // namespace pycomm::shared
