// Builds the full mesh of channels from addresses in the rendezvous store.
//
// Each rank listens, publishes its addresses, reads those of all ranks, dials the lower ranks and
// accepts the higher ones (connector.h). Once the mesh is complete no rank listens any more. A
// large group has no mesh: its ranks connect on demand, and an OnDemandConnector listens as long as
// the group exists.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/rank_info.h"
#include "core/deadline.h"
#include "core/member.h"
#include "engine/peer_connector.h"
#include "os/shared_heap.h"
#include "transport/transport.h"

namespace pycomm::bootstrap {

// Throws the error that ended the parent group, so that a peer will not connect. Waits up to
// `limit` for one.
using CheckAborted = std::function<void(std::chrono::nanoseconds limit)>;

struct MeshRequest {
  int rank = 0, size = 1;
  std::string name;
  std::string host{};                   // see ConnectOptions
  std::string key;                      // for the handshakes
  std::string transport;                // the only one to use, or empty
  std::string address;                  // local addresses for tcp, or empty
  std::string towards;                  // rank 0's host as known here, or empty
  size_t memory_bytes = 0;              // shared memory of each rank for its host
  bool shares = true;                   // whether to share memory; off for all if off for one
  bool encrypt = false;                 // encrypt connections between hosts
  bool open_key = false;                // the secret is in the store, readable for all its clients
  std::string options;                  // must be equal on all ranks; shown in the error if not
  std::vector<TunedThresholds> tuned;   // this rank's measured thresholds
  int full_mesh = 64;                   // largest group that forms a full mesh
  std::function<bool()> interrupted{};  // polled every 100 ms while it waits; may be empty
  std::function<void(const std::string&)> log;  // one line per failed attempt; may be empty
  CheckAborted check_aborted{};                 // called in each round; may be empty
  // Called with the reason before PeerLost is thrown because the system forbids Unix sockets to a
  // rank of this host. May be empty.
  std::function<void(const std::string& why)> forbidden{};
};

struct Mesh {
  std::vector<std::unique_ptr<transport::Channel>>
      channels;  // by rank; null for this rank and unconnected ones
  std::unique_ptr<engine::PeerConnector> connector;  // connects those; null if the mesh is complete
  std::vector<Member> members;                       // by rank
  // By rank, if the ranks of every host share memory: the shared memory of each rank of this host,
  // null for ranks of other hosts. Otherwise empty.
  std::vector<std::shared_ptr<std::byte>> memories;
  // By rank, if all ranks share a host and have heaps: the heaps as mapped here. Otherwise empty.
  std::vector<os::HeapView> heaps;
  std::shared_ptr<os::SharedHeap> heap;  // this rank's, if it has one
  std::vector<TunedThresholds> tuned;    // rank 0's
  std::vector<std::string> hosts;        // by rank: equal for ranks of one host
  uint64_t id = 0;                       // of the group: unique, equal on its ranks
};

// Takes this rank's info and returns those of all ranks, by rank.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

// Throws Timeout naming the missing ranks, PeerLost, Mismatch (options differ) or Unsupported (no
// transport reaches a peer).
Mesh form_mesh(const MeshRequest& request, const Exchange& exchange, const Deadline& deadline);

// "rank 2 (host a, pid 77)"
std::string name_of(int rank, const Member& member);

}  // namespace pycomm::bootstrap
