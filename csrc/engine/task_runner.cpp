#include "engine/task_runner.h"

#include <string>

namespace pycomm::engine {

void TaskRunner::run(Task& task, const TaskCall& call, const Deadline& deadline) {
  const std::lock_guard turn(turn_);
  if (call.is_collective) calls_.begin(call.signature, call.peer_counts);
  liveness_.enter_call(call.signature);
  struct End {
    TaskRunner& runner;
    ~End() {
      runner.liveness_.leave_call();
      runner.calls_.end();
      runner.mailbox_.end_receives();
      runner.idle_.end_call();
      runner.traffic_ = runner.sum();
    }
  } const end{*this};
  shutdown_.check_usable();
  try {
    loop_.drive(task, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::mismatch) throw;
    shutdown_.fail_call(error, call.signature, deadline);
  } catch (const std::exception& error) {  // thrown by `interrupted`, or out of memory
    const auto operation = static_cast<Operation>(call.signature.operation);
    shutdown_.fail(InternalError(std::string(name_of(operation)) + ": " + error.what()));
    throw;
  }
  if (call.is_collective) calls_.complete(call.signature);
}

EngineTraffic TaskRunner::sum() const {
  EngineTraffic sums{.payload_sent = sender_.payload_sent(), .waited = loop_.waited()};
  for (const Peer& peer : peers_.all()) {
    if (!peer.link) continue;
    sums.frames_sent += peer.link->frames_sent();
    sums.bytes_written += peer.link->bytes_written();
    sums.bytes_received += peer.link->bytes_received();
  }
  return sums;
}

}  // namespace pycomm::engine
