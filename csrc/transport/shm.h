// The transport within a host: shared memory passed over a Unix socket, which then serves as the
// wake-up socket. The socket has a random abstract name, which ends with the listener; the memory
// has no name.
#pragma once

#include "transport/transport.h"

namespace pycomm::transport {

// Null if this host has no memfd or no abstract Unix sockets; `why` is then the reason. `heap`, if
// not null, is shared with peers that have a heap too.
std::unique_ptr<SocketTransport> make_shm(size_t ring_bytes, size_t memory_bytes, std::string& why,
                                          std::shared_ptr<os::SharedHeap> heap = {});

}  // namespace pycomm::transport
