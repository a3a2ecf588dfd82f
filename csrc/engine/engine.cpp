#include "engine/engine.h"

#include <utility>

namespace pycomm::engine {

Engine::Engine(std::vector<std::unique_ptr<transport::Channel>> channels, EngineOptions options)
    : peers_({options.rank, std::move(options.names), std::move(options.pids)},
             std::move(channels)),
      mailbox_(peers_, calls_),
      liveness_(peers_, calls_, options.heartbeat),
      mismatches_(peers_, calls_, mailbox_),
      connections_(options.connector, peers_, liveness_, mismatches_),
      dispatcher_(peers_, calls_, mailbox_, liveness_, mismatches_),
      sender_(peers_, connections_, dispatcher_),
      shutdown_(peers_, calls_, liveness_, connections_, dispatcher_),
      loop_({options.spin, std::move(options.interrupted)}, turn_, peers_, mailbox_, liveness_,
            connections_, dispatcher_),
      idle_(turn_, peers_, liveness_, connections_, dispatcher_, shutdown_),
      runner_(turn_, peers_, calls_, mailbox_, liveness_, sender_, loop_, idle_, shutdown_),
      messenger_(turn_, peers_, calls_, mailbox_, sender_, dispatcher_, runner_) {}

void Engine::run(const PlanJob& job, const Deadline& deadline) {
  const transport::Header header = calls_.next_header(job.signature);
  PlanTask task = plan_task(job, header);
  runner_.run(task, {.signature = header, .peer_counts = job.peer_counts}, deadline);
}

void Engine::run(Task& task, const transport::Header& header, const Deadline& deadline) {
  runner_.run(task, {.signature = header}, deadline);
}

void Engine::leave(std::chrono::nanoseconds wait,
                   const std::function<bool()>& interrupted) noexcept {
  const std::lock_guard turn(turn_);
  shutdown_.leave(wait, interrupted);
}

void Engine::fail(const Error& error) noexcept {
  const std::lock_guard turn(turn_);
  shutdown_.fail(error);
}

EngineStatus Engine::status() const {
  EngineStatus now = liveness_.status();
  now.broken = shutdown_.cause();
  now.lost = shutdown_.lost();
  return now;
}

}  // namespace pycomm::engine
