// How a group comes to be.
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
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);  // of the forming and of every call
  // Of silence, after which a rank that is waited for is lost: it is stopped or its host is gone.
  // 0: never. The same on every rank.
  std::chrono::nanoseconds heartbeat = std::chrono::seconds(10);
  std::string secret;     // the run's key; rank 0 makes one and leaves it in the store if empty
  std::string transport;  // "local", "shm", "tcp": that one only; empty: the best for each pair
  std::string address;    // which of this host's addresses tcp uses (os/interfaces.h); empty: all
  bool encrypt = false;   // connections with ranks of other hosts: transport/encrypted.h
  bool open_key = false;  // set by connect(): the store held the key
  std::function<void(const std::string& why)> forbidden;  // set by connect(): MeshRequest's
  std::string host;     // for tests: of which made-up host of this machine; empty: of this one
  std::string towards;  // rank 0's host, towards which its best address lies; empty: unknown
  // Sums in rank order whatever the size: bits depend on the inputs alone.
  bool reproducible = false;
  std::vector<TunedThresholds>
      tuned;                     // where choices turn by transport, if measured; rank 0's count
  FlightRecorderFiles recorder;  // where a flight record and a trace go
  std::vector<Fault> faults;     // for tests: what goes wrong on this rank
  // For benchmarks: behind which all channels of this rank lie; or null.
  std::shared_ptr<RateLimitedLink> rate_limited_link;
  // Up to so many ranks each is connected to each from the start and nothing listens once the group
  // stands; in a larger group two ranks connect when one first sends to the other. The same on all.
  int full_mesh = 64;
  std::function<bool()> interrupted;            // asked at least every 100 ms while a call waits
  std::function<void(const std::string&)> log;  // one line for a person; may be empty
};

// Collective. Every rank calls it with the same store, size and name. Where all ranks use a name
// again in one store the group's name gets a number: "world", "world#2", so that a group's name is
// its own. `ranks`: the group's ranks() where it is not the first; empty: it is. Throws Timeout
// naming the ranks that did not come, PeerLost, Mismatch (options differ).
std::shared_ptr<Group> connect(Store& store, ConnectOptions options, std::vector<int> ranks = {});

// Throws InvalidArgument where `address`, as ConnectOptions has it, names none of this host's.
// Before the store is met, so that every rank hears of its own mistake.
void check_address(const std::string& address);

}  // namespace pycomm
