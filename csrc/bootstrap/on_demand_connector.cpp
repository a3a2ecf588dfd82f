#include "bootstrap/on_demand_connector.h"

#include <utility>

#include "core/errors.h"
#include "os/thread.h"

namespace pycomm::bootstrap {
namespace {

// A rank that left or died does not return: a refused dial is repeated for 1 s.
constexpr int kRefusals = 20;
constexpr std::chrono::hours kIdle{1};

}  // namespace

OnDemandConnector::OnDemandConnector(Connector::Options options, size_t ring_bytes) {
  for (const auto& address : options.addresses) local_.push_back(address.transport == nullptr);
  const auto me = static_cast<size_t>(options.rank);
  bool by_socket = false, in_process = false;
  for (size_t i = 0; i < local_.size(); ++i)
    if (i != me) (local_[i] ? in_process : by_socket) = true;
  if (in_process)
    listener_.emplace(transport::InProcessGroup{options.context, options.agreed}, options.rank,
                      ring_bytes, [this](int peer, std::unique_ptr<transport::Channel> channel) {
                        std::vector<engine::ConnectResult> one(1);
                        one[0] = {.peer = peer, .channel = std::move(channel)};
                        add_results(std::move(one));
                      });
  if (!by_socket) return;
  options.max_refusals = kRefusals;
  connector_.emplace(std::move(options));
  thread_ = os::start_thread("pycomm-connect", [this] { loop(); });
}

void OnDemandConnector::request(int peer) {
  if (local_[static_cast<size_t>(peer)]) {
    if (listener_->connect(peer)) return;
    std::vector<engine::ConnectResult> none(1);
    none[0] = {.peer = peer, .why = "it has left"};
    return add_results(std::move(none));
  }
  {
    const std::lock_guard lock(mutex_);
    wanted_.push_back(peer);
  }
  wake_event_.notify();
}

std::vector<engine::ConnectResult> OnDemandConnector::take() {
  if (!has_results_.load()) return {};
  const std::lock_guard lock(mutex_);
  results_event_.clear();
  has_results_.store(false);
  return std::exchange(results_, {});
}

void OnDemandConnector::add_results(std::vector<engine::ConnectResult> results) {
  if (results.empty()) return;
  const std::lock_guard lock(mutex_);
  for (engine::ConnectResult& result : results) results_.push_back(std::move(result));
  has_results_.store(true);
  results_event_.notify();
}

void OnDemandConnector::close() noexcept {
  listener_.reset();
  ending_.store(true);
  wake_event_.notify();
  if (thread_.joinable()) thread_.join();
  connector_.reset();
}

// Connection errors are results. An exception here is local, such as out of memory: this rank
// connects to no further peer, and the engine receives that result for every peer.
void OnDemandConnector::loop() noexcept {
  try {
    serve();
  } catch (const std::exception& error) {
    std::vector<engine::ConnectResult> lost;
    for (size_t i = 0; i < local_.size(); ++i)
      if (!local_[i])
        lost.push_back(
            {.peer = static_cast<int>(i),
             .why = std::string("this rank can no longer connect to peers: ") + error.what()});
    add_results(std::move(lost));
  }
}

void OnDemandConnector::serve() {
  while (!ending_.load()) {
    {
      const std::lock_guard lock(mutex_);
      for (const int peer : std::exchange(wanted_, {})) connector_->dial(peer);
    }
    std::vector<pollfd> also{{wake_event_.descriptor(), POLLIN, 0}};
    add_results(connector_->poll(kIdle, also));
    if (also[0].revents != 0) wake_event_.clear();
  }
}

}  // namespace pycomm::bootstrap
