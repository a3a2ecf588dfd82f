// Connects the ranks of a large group when they first need each other. A thread owns the listeners
// as long as the group exists, accepts and dials (connector.h), and passes channels that both ends
// accepted to the engine. Ranks of one process need no thread.
//
// The thread does not use a channel after passing it on, nor Python.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "bootstrap/connector.h"
#include "engine/peer_connector.h"
#include "os/wake_event.h"
#include "transport/local.h"

namespace pycomm::bootstrap {

class OnDemandConnector final : public engine::PeerConnector {
 public:
  // Addresses without a transport are ranks of this process, connected by rings of `ring_bytes`.
  OnDemandConnector(Connector::Options options, size_t ring_bytes);
  ~OnDemandConnector() override { close(); }

  void request(int peer) override;
  std::vector<engine::ConnectResult> take() override;
  int descriptor() const override { return results_event_.descriptor(); }
  void close() noexcept override;

 private:
  void loop() noexcept;
  void serve();
  void add_results(std::vector<engine::ConnectResult> results);

  std::vector<bool> local_;                   // by rank
  os::WakeEvent wake_event_, results_event_;  // wakes the thread; readable while there are results
  std::mutex mutex_;                          // guards the next two
  std::vector<int> wanted_;                   // not yet dialed
  std::vector<engine::ConnectResult> results_;  // not yet taken
  std::atomic<bool> has_results_{false};        // results_ is not empty
  std::atomic<bool> ending_{false};
  std::optional<transport::InProcessListener> listener_;
  std::optional<Connector> connector_;  // used by the thread while it runs
  std::thread thread_;
};

}  // namespace pycomm::bootstrap
