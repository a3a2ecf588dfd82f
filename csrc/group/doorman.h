// Lets the ranks of a large group meet when they first need each other: a thread that owns the
// listeners for as long as the group stands, answers and makes calls (lobby.h), and hands the
// engine channels that stand at both ends. Ranks of one process need no thread to meet.
//
// The thread never touches a channel that it has handed over, nor Python. Made by form_mesh();
// used by the group's engine.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/peer_connector.h"
#include "group/lobby.h"
#include "transport/local.h"

namespace pycomm {

class Doorman final : public PeerConnector {
 public:
  // Contacts without a transport are ranks of this process, met in rings of `ring_bytes`.
  Doorman(Lobby::Request request, size_t ring_bytes);
  ~Doorman() override { close(); }

  void request(int peer) override;
  std::vector<ConnectResult> take() override;
  int descriptor() const override { return arrived_.get(); }
  void close() noexcept override;

 private:
  void loop() noexcept;
  void serve();
  void deliver(std::vector<ConnectResult> arrivals);

  std::vector<bool> local_;           // by rank
  Fd wake_, arrived_;                 // wakes the thread; readable while something has arrived
  std::mutex mutex_;                  // guards the next two
  std::vector<int> wanted_;           // not yet called
  std::vector<ConnectResult> inbox_;  // not yet taken
  std::atomic<bool> news_{false};     // the inbox holds something
  std::atomic<bool> ending_{false};
  std::optional<InProcessListener> listener_;
  std::optional<Lobby> lobby_;  // the thread's, while that runs
  std::thread thread_;
};

}  // namespace pycomm
