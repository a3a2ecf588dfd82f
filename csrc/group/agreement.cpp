// How the ranks agree about a collective whose arrays lie on devices before one of them enqueues
// it: a barrier whose frames say that they are the call's. Of a message the two ranks agree alone,
// in engine/messages.cpp.
//
// No rank leaves a barrier before it has heard of every other, directly or through ranks that went
// on only because what they heard was the same. So either all ranks pass, or none does.
#include "collectives/choose.h"
#include "group/check.h"
#include "group/host_group.h"
#include "shared/shared_call.h"

namespace pycomm {

void HostGroup::agree(const Call& call, const Deadline& deadline) {
  const Header signature = signature_of(call, call.algorithm);
  // What ranks exchange by counts differs from pair to pair, so that every pair must meet.
  const bool pairs = call.operation == Operation::all_to_all && !call.counts.empty();
  if (arena_ && host_count_ == 1 && !pairs) {
    const SharedJob nothing{.operation = Operation::barrier, .element_bytes = 1};
    const Header header = engine_.next_header(signature);
    arena_->begin(header);
    SharedCall run(engine_, *arena_, nothing, header);
    return engine_.run(run, header, deadline);
  }
  const Call barrier;
  const Algorithm by =
      pairs ? Algorithm::direct : choose({.size = options_.size, .hosts = host_count_});
  Job job;
  job.schedule = &planned(barrier, by, 0).schedule;
  job.signature = signature;
  job.element_bytes = 1;
  job.size = options_.size;
  if (pairs) job.claims = call.counts;
  run_plan(job, deadline);
}

}  // namespace pycomm
