// A call inside one host: where the arrays lie if the ranks map them, else through slots.
//
// Not the engine: that drives this task, and does its waiting, deadlines and failures. Called by
// the group.
#pragma once

#include <optional>

#include "shared/mapped_run.h"
#include "shared/shared_run.h"

namespace pycomm {

class SharedCall final : public Task {
 public:
  // `header` with its epoch and sequence.
  SharedCall(Engine& engine, Arena& arena, const SharedJob& job, const Header& header)
      : engine_(engine), arena_(arena), job_(job), header_(header) {
    if (MappedRun::may_carry_out(job, arena))
      mapped_.emplace(engine, arena, job, header);
    else
      staged_.emplace(engine, arena, job, header);
  }

  bool advance() override {
    if (staged_) return staged_->advance();
    if (!mapped_->refused()) return mapped_->advance();
    staged_.emplace(engine_, arena_, job_, header_);
    return true;
  }
  bool done() const override { return now().done(); }
  int sending_to() const override { return kNobody; }
  int receiving_from() const override { return now().receiving_from(); }
  void arm() override { now().arm(); }
  void disarm() override { now().disarm(); }

 private:
  const Task& now() const { return staged_ ? static_cast<const Task&>(*staged_) : *mapped_; }
  Task& now() { return staged_ ? static_cast<Task&>(*staged_) : *mapped_; }

  Engine& engine_;
  Arena& arena_;
  const SharedJob& job_;
  const Header& header_;
  std::optional<MappedRun> mapped_;
  std::optional<SharedRun> staged_;
};

}  // namespace pycomm
