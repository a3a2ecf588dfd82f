// Options of a group.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/rank_info.h"
#include "core/member.h"
#include "observe/flight_recorder.h"
#include "transport/transport.h"

namespace pycomm::group {

// Replaces the channel to a peer, when the group forms, by one that uses it.
using ChannelWrapper = std::function<std::unique_ptr<transport::Channel>(
    std::unique_ptr<transport::Channel> inner, int peer)>;

// For tests and benchmarks, see testing/. Each may be empty; either turns shared memory off.
struct ChannelWrappers {
  ChannelWrapper inject_faults;  // for a group, not for its subgroups
  ChannelWrapper limit_rate;     // for a group and its subgroups
};

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
  // Of a later group, by rank: the ranks in the parent, and what is known of them there (set by
  // connect_part()). Empty: unknown.
  std::vector<int> parent_ranks;
  std::vector<Member> known;
  std::string host;     // for tests: name of a simulated host; empty: the real one
  std::string towards;  // rank 0's host, for choosing an address by route; empty: unknown
  // Sums in rank order for every size: results depend on the inputs only.
  bool reproducible = false;
  // Whether several threads may call at once; may differ between ranks.
  bool thread_multiple = false;
  std::vector<bootstrap::TunedThresholds>
      tuned;                              // measured thresholds by transport; rank 0's apply
  observe::FlightRecorderFiles recorder;  // paths of the flight record and the trace
  ChannelWrappers wrap;
  // Groups of at most this size form a full mesh, and no rank listens afterwards. In larger groups
  // two ranks connect when one first sends to the other. Equal on all ranks.
  int full_mesh = 64;
  std::function<bool()> interrupted;            // polled at least every 100 ms while a call waits
  std::function<void(const std::string&)> log;  // logs one line; may be empty
};

// The secret of a subgroup: HMAC-SHA-256 of a label and its name under the secret of its group. The
// label separates it from all other uses of that secret.
std::string subgroup_secret(const std::string& secret, const std::string& name);

}  // namespace pycomm::group
