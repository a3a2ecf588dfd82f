// The waits of a client of the TCP store: each ends at its deadline, or when the program interrupts
// the client.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "core/deadline.h"
#include "core/errors.h"
#include "os/socket.h"

namespace pycomm::rendezvous {

class ClientWait {
 public:
  // `server`: its address, for errors. `interrupted`: StoreHooks::interrupted.
  ClientWait(std::string server, std::function<bool()> interrupted)
      : server_(std::move(server)), interrupted_(std::move(interrupted)) {}

  const std::string& server() const { return server_; }
  bool is_interrupted() const { return interrupted_ && interrupted_(); }
  void check_interrupted() const {
    if (is_interrupted())
      throw GroupBroken("waiting for the store at " + server_ + " was interrupted");
  }

  // Waits for one of the events; false at the deadline or after an interruption. It polls at least
  // once, so that a call that cleans up after an interruption still gets an immediate answer.
  bool wait(int fd, short events, const Deadline& deadline) const {
    do {
      const auto slice = std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left());
      if (os::poll_one(fd, events, slice) != 0) return true;
    } while (!is_interrupted() && !deadline.expired());
    return false;
  }

 private:
  std::string server_;
  std::function<bool()> interrupted_;
};

}  // namespace pycomm::rendezvous
