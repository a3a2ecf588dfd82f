#include "shared/shared_call.h"

#include <chrono>
#include <utility>

namespace pycomm {
namespace {

size_t bytes_of(const SharedJob& job) { return job.count * job.element_bytes; }

}  // namespace

SharedCall::SharedCall(Engine& engine, Arena& arena, const SharedJob& job, const Header& header)
    : engine_(engine), arena_(arena), job_(job), header_(header) {
  if (Meeting::is_held(job, arena)) {
    const Trials& pulls = arena.pulls(job.operation, bytes_of(job));
    now_ = &tasks_.emplace<Meeting>(engine, arena, job, header, pulls.way(pulls.turns));
  } else {
    now_ = &tasks_.emplace<SharedRun>(engine, arena, job, header);
    way_ = Way::staged;
  }
}

// Others may work on this rank's arrays, or read them: also before it has met them, as they may
// have met meanwhile.
SharedCall::~SharedCall() {
  if (way_ != Way::staged && !done()) arena_.leave();
}

bool SharedCall::advance() {
  if (!now_->advance()) return false;
  if (const auto* meeting = std::get_if<Meeting>(&tasks_); meeting != nullptr && meeting->done())
    now_ = begin(*meeting);
  else if (tries_ && done())
    end_try();
  return true;
}

// Only the lowest rank's times count, as it chooses.
Task* SharedCall::begin(const Meeting& meeting) {
  way_ = meeting.way();
  if (meeting.could_be_pulled() && arena_.is_warm()) {
    Trials& pulls = arena_.pulls(job_.operation, bytes_of(job_));
    turn_ = pulls.turns++;
    tries_ = arena_.rank() == 0 && pulls.tries(turn_);
    if (tries_) begun_ = Clock::now();
  }
  std::vector<Offered> places = meeting.places();
  switch (meeting.way()) {
    case Way::mapped:
      return &tasks_.emplace<MappedRun>(engine_, arena_, job_, header_, std::move(places));
    case Way::pulled:
      return &tasks_.emplace<PulledRun>(engine_, arena_, job_, header_, std::move(places));
    case Way::staged:
      break;
  }
  return &tasks_.emplace<SharedRun>(engine_, arena_, job_, header_);
}

void SharedCall::end_try() {
  const std::chrono::duration<double, std::nano> spent = Clock::now() - begun_;
  const auto bytes = static_cast<double>(bytes_of(job_));
  arena_.pulls(job_.operation, bytes_of(job_)).took(turn_, spent.count() / bytes);
  tries_ = false;
}

}  // namespace pycomm
