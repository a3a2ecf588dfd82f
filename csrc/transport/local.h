// Ranks as threads of one process: the same rings as between processes, with nothing to connect.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace pycomm {

// The channel between `rank` and `peer` of the group called `meeting`, a name unique in the
// process. The first rank makes both ends; a second call for the same end is an InternalError. The
// second end waits only while the first exists: a rank that comes later gets a closed channel.
// `agreed`, if not null, is what this rank knows of the group; the second rank finds there what the
// first gave.
std::unique_ptr<Channel> local_channel(const std::string& meeting, int rank, int peer,
                                       size_t ring_bytes, std::string* agreed = nullptr);

struct InProcessGroup {
  std::string name;
  std::string agreed{};  // what all its ranks must know alike
};

// The same for ranks that need channels one by one: each listens for the others of the group.
class InProcessListener {
 public:
  using OnConnected = std::function<void(int peer, std::unique_ptr<Channel> channel)>;

  // `arrived` is called once for each peer, on the thread of whichever of the two calls; it must
  // not wait, nor call a listener. Throws Mismatch where the rank that came first gave another
  // `agreed`: its calls then fail.
  InProcessListener(const InProcessGroup& of, int rank, size_t ring_bytes,
                    OnConnected on_connected);
  ~InProcessListener();  // after it nothing arrives
  // Gives both ranks their end; the peer's is kept until it listens. False: the peer has stopped
  // listening. A second call has no effect.
  bool call(int peer);

 private:
  struct Registry;
  std::shared_ptr<Registry> registry_;
  int rank_;
  size_t ring_bytes_;
  OnConnected on_connected_;
};

// What `rank` lays out for the other ranks of the group: `bytes` of zeroes when it is first asked
// for, by any rank, and freed when no rank holds it.
std::shared_ptr<std::byte> local_memory(const std::string& meeting, int rank, size_t bytes);

}  // namespace pycomm
