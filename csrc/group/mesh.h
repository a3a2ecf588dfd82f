// Builds the full mesh of channels from addresses in the rendezvous store.
//
// Each rank listens, publishes its addresses, reads those of all ranks, dials the lower ranks and
// accepts the higher ones (connector.h). Once the mesh is complete no rank listens any more. A
// large group has no mesh: its ranks connect when they first need each other, and an
// OnDemandConnector listens as long as the group exists. Called by connect() and by Group::split().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "engine/peer_connector.h"
#include "group/group.h"
#include "group/rank_info.h"
#include "os/shared_heap.h"
#include "transport/transport.h"

namespace pycomm {

// Throws where a peer will not come, as the group in which these ranks met has ended; until the
// limit it waits for that.
using CheckAborted = std::function<void(std::chrono::nanoseconds limit)>;

struct MeshRequest {
  int rank = 0, size = 1;
  std::string name;
  std::string host{};       // as ConnectOptions has it
  std::string key;          // for the handshakes
  std::string transport;    // force one, or empty
  std::string address;      // which of this host's addresses tcp uses, or empty
  std::string towards;      // rank 0's host as this one knows it, or empty
  size_t memory_bytes = 0;  // that ranks of one host lay out for each other
  bool shares = true;       // whether it does; one rank that does not is enough
  bool encrypt = false;     // connections with ranks of other hosts
  bool open_key = false;    // the store held the key: it protects nothing from who reads the store
  std::string options;      // must be the same on every rank; shown when it is not
  std::vector<TunedThresholds> tuned;  // what this rank knows of where choices turn
  int full_mesh = 64;  // up to so many ranks each holds a channel to each from the start
  std::function<bool()> interrupted{};          // asked every 100 ms while it waits; may be empty
  std::function<void(const std::string&)> log;  // a line for each attempt that failed; may be empty
  CheckAborted check_aborted{};                 // asked in each round; may be empty
  // Called before PeerLost is thrown where the system refuses Unix sockets to a rank of this host,
  // with the reason; may be empty.
  std::function<void(const std::string& why)> forbidden{};
};

struct Mesh {
  std::vector<std::unique_ptr<Channel>> channels;  // by rank; null for oneself and who is not met
  std::unique_ptr<PeerConnector> connector;        // meets those; null where all are met
  std::vector<Member> members;                     // by rank
  // By rank, where ranks that share a host share memory, on every host: what each of this one's
  // lays out for the others, and null for ranks of other hosts. Else empty.
  std::vector<std::shared_ptr<std::byte>> memories;
  // By rank, where all ranks share a host and have a heap: their heaps as mapped here. Else empty.
  std::vector<HeapView> heaps;
  std::shared_ptr<SharedHeap> heap;    // this rank's, if it has one
  std::vector<TunedThresholds> tuned;  // rank 0's, for all
  std::vector<std::string> hosts;      // by rank: equal where ranks share a host
  uint64_t id = 0;                     // of the group: the same on its ranks, and on no others
};

// Takes this rank's info and returns those of all ranks, by rank.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

// Throws Timeout naming who is missing, PeerLost, Mismatch (options), Unsupported (no transport
// reaches a peer).
Mesh form_mesh(const MeshRequest& request, const Exchange& exchange, const Deadline& deadline);

// "rank 2 (host a, pid 77)"
std::string name_of(int rank, const Member& member);

}  // namespace pycomm
