// The transport between ranks that are threads of one process: the same rings as between processes.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace pycomm::transport {

// The channel between `rank` and `peer` of `group`, a name unique in the process. The first rank
// makes both ends; a second call for the same end is an InternalError. The second end is kept while
// the first one exists; after that its rank gets a closed channel. `agreed`, if not null, describes
// the group; the second rank gets the value that the first passed.
std::unique_ptr<Channel> local_channel(const std::string& group, int rank, int peer,
                                       size_t ring_bytes, std::string* agreed = nullptr);

struct InProcessGroup {
  std::string name;
  std::string agreed{};  // must be equal at all its ranks
};

// Channels on demand: each rank listens for the others of the group.
class InProcessListener {
 public:
  using OnConnected = std::function<void(int peer, std::unique_ptr<Channel> channel)>;

  // `on_connected` is called once for each peer, on the thread of the rank that connects; it must
  // not wait or call a listener. Throws Mismatch if the first rank passed a different `agreed`;
  // connect() to this rank then returns false.
  InProcessListener(const InProcessGroup& of, int rank, size_t ring_bytes,
                    OnConnected on_connected);
  ~InProcessListener();  // no call of on_connected after it
  // Passes both ranks their ends; the peer's end is kept until it listens. False: the peer stopped
  // listening. A second call has no effect.
  bool connect(int peer);

 private:
  struct Registry;
  std::shared_ptr<Registry> registry_;
  int rank_;
  size_t ring_bytes_;
  OnConnected on_connected_;
};

// The memory segment of `rank` for the other ranks of the group: `bytes` of zeros at the first call
// of any rank, and freed with its last reference.
std::shared_ptr<std::byte> local_memory(const std::string& group, int rank, size_t bytes);

}  // namespace pycomm::transport
