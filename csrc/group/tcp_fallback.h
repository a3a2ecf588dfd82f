// The flag of a group in the store: form the group again with TCP.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "core/deadline.h"
#include "core/errors.h"
#include "rendezvous/store.h"

namespace pycomm::group {

// Limit for removing a rank's keys from the store after forming failed, so that an unresponsive
// store does not delay the error.
inline constexpr std::chrono::milliseconds kCleanUpTime{400};

// If the system forbids Unix sockets between two ranks of a host, one of them sets a flag in the
// store, and all ranks form the group again with TCP. Ranks poll the flag while they wait.
inline constexpr std::chrono::milliseconds kFallbackPollInterval{100};

class TcpFallbackFlag {
 public:
  TcpFallbackFlag(rendezvous::Store& store, std::string key)
      : store_(&store), key_(std::move(key)) {}

  void set(const std::string& why) {
    if (store_ != nullptr) store_->set(key_, why, Deadline(kCleanUpTime));
  }
  // Whether the flag is set, as of kFallbackPollInterval ago or, with `now`, as of now.
  bool is_set(bool now) {
    if (store_ == nullptr || !why_.empty()) return !why_.empty();
    if (!now && Clock::now() - checked_at_ < kFallbackPollInterval) return false;
    checked_at_ = Clock::now();
    try {
      why_ = store_->get(key_, Deadline(std::chrono::nanoseconds{0}));
    } catch (const Error& error) {
      // Timeout: the flag is not set. Other errors: the store is closed and no longer needed; its
      // error would hide which ranks are unreachable.
      if (error.kind() == ErrorKind::peer_lost)
        store_ = nullptr;
      else if (error.kind() != ErrorKind::timeout)
        throw;
    }
    return !why_.empty();
  }
  const std::string& why() const { return why_; }
  // Forming is complete or failed: the store may close.
  void end() { store_ = nullptr; }

 private:
  rendezvous::Store* store_;
  std::string key_, why_;
  Clock::time_point checked_at_ = Clock::now();
};

}  // namespace pycomm::group
