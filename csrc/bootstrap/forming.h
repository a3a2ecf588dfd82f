// What a rank does while the mesh of a group forms: a function of what it observed, without I/O and
// clocks. mesh.cpp observes, dials and reports; tests/native/forming_orders_test.cpp does so in a
// network of its own, in all orders.
//
// Each rank dials the lower ranks and accepts the higher ones, until no rank is missing. A rank
// that is one step from connecting may already have a complete group, so such connections are
// completed before a rank fails because of another one: those ranks must receive the cause.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/choose.h"

namespace pycomm::bootstrap {

class Forming {
 public:
  using Time = std::chrono::nanoseconds;  // since forming began

  // After this delay a rank dials the peers that should have dialed it: a firewall may allow
  // connections in one direction only.
  static constexpr Time kDialBackDelay = std::chrono::seconds(1);
  // How long to complete connections in progress: much longer than a handshake takes. In this time
  // a rank that left in an orderly way also tells its peers why, and they forward the reason.
  static constexpr Time kFinalConnectTimeout = std::chrono::milliseconds(200);

  enum class Result { waits, complete, different, unreachable, closed, died, interrupted, late };
  struct Verdict {
    Result result = Result::waits;
    int peer = collectives::kNoRank;  // that is the cause, if one is
  };

  // `missing`: the peers to connect.
  Forming(int rank, std::vector<int> missing, Time limit)
      : rank_(rank), limit_(limit), missing_(std::move(missing)) {}

  void connected(int peer) { std::erase(missing_, peer); }
  void different(int peer) { set(different_, peer); }  // it read other rank infos
  void unreachable(int peer) {
    connected(peer);
    if (!closed_) set(unreachable_, peer);
  }
  void closed(int peer, Time now) { set(closed_, {peer, now + kFinalConnectTimeout}); }
  void ended(int peer, Time now) { set(ended_, {peer, now + kFinalConnectTimeout}); }
  void interrupted() { interrupted_ = true; }

  // The peers to dial from now on, each once.
  std::vector<int> dials(Time now) {
    std::vector<int> found;
    for (const int peer : missing_)
      if ((!dials_lower_ && peer < rank_) ||
          (!dials_higher_ && peer > rank_ && now >= kDialBackDelay))
        found.push_back(peer);
    dials_lower_ = true;
    dials_higher_ = now >= kDialBackDelay;
    return found;
  }

  Verdict verdict(Time now) const {
    if (different_) return {Result::different, *different_};
    if (unreachable_) return {Result::unreachable, *unreachable_};
    if (closed_) {
      const bool over = missing_.empty() || now >= closed_->second;
      return {over ? Result::closed : Result::waits, closed_->first};
    }
    if (ended_ && now >= ended_->second) return {Result::died, ended_->first};
    if (missing_.empty()) return {Result::complete};
    if (interrupted_) return {Result::interrupted};
    return {now >= limit_ ? Result::late : Result::waits};
  }

  const std::vector<int>& missing() const { return missing_; }

 private:
  using Cause = std::pair<int, Time>;  // a peer, and when it counts

  template <typename T>
  static void set(std::optional<T>& first, T value) {
    if (!first) first = value;
  }

  int rank_;
  Time limit_;
  std::vector<int> missing_;
  std::optional<int> different_, unreachable_;
  std::optional<Cause> closed_, ended_;
  bool interrupted_ = false, dials_lower_ = false, dials_higher_ = false;
};

}  // namespace pycomm::bootstrap
