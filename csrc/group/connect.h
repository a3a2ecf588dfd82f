// Forms a group: connects its ranks through the rendezvous store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/flight_recorder.h"
#include "group/group.h"
#include "group/rank_info.h"
#include "rendezvous/store.h"
#include "transport/faulty.h"
#include "transport/rate_limited.h"

namespace pycomm {

struct ConnectOptions {
  int rank = 0;
  int size = 1;
  std::string name = "world";
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);  // of forming and of each call
  // Heartbeat timeout: an awaited rank that sends nothing for so long is lost, because it is
  // stopped or its host is down. 0: none. Equal on all ranks.
  std::chrono::nanoseconds heartbeat = std::chrono::seconds(10);
  std::string secret;     // shared secret; if empty, rank 0 stores a random one
  std::string transport;  // "local", "shm" or "tcp" for all pairs; empty: the best for each
  std::string address;    // local addresses for tcp (os/interfaces.h); empty: all
  bool encrypt = false;   // connections between hosts: transport/encrypted.h
  bool open_key = false;  // set by connect(): the secret is in the store
  std::function<void(const std::string& why)> forbidden;  // set by connect(): MeshRequest's
  std::string host;     // for tests: name of a simulated host; empty: the real one
  std::string towards;  // rank 0's host, for choosing an address by route; empty: unknown
  // Sums in rank order for every size: results depend on the inputs only.
  bool reproducible = false;
  std::vector<TunedThresholds> tuned;  // measured thresholds by transport; rank 0's apply
  FlightRecorderFiles recorder;        // paths of the flight record and the trace
  std::vector<Fault> faults;           // for tests: injected faults of this rank
  // For benchmarks: a link that limits all channels of this rank, or null.
  std::shared_ptr<RateLimitedLink> rate_limited_link;
  // Groups of at most this size form a full mesh, and no rank listens afterwards. In larger groups
  // two ranks connect when one first sends to the other. Equal on all ranks.
  int full_mesh = 64;
  std::function<bool()> interrupted;            // polled at least every 100 ms while a call waits
  std::function<void(const std::string&)> log;  // logs one line; may be empty
};

// Collective: every rank calls it with the same store, size and name. If all ranks reuse a name in
// one store, the group's name gets a number ("world", "world#2"), so that names are unique.
// `ranks`: the group's ranks() if it is not the world group; empty: the world group. Throws Timeout
// naming the missing ranks, PeerLost, or Mismatch (options differ).
std::shared_ptr<Group> connect(Store& store, ConnectOptions options, std::vector<int> ranks = {});

// Throws InvalidArgument if `address`, as in ConnectOptions, matches no address of this host. Call
// it before using the store, so that each rank reports its own mistake.
void check_address(const std::string& address);

}  // namespace pycomm
