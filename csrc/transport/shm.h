// Processes of one host: shared memory passed over a Unix socket, which then serves as the wake-up
// socket.
//
// The socket's name is abstract, random, and gone with the listener; the memory never had one.
#pragma once

#include "transport/transport.h"

namespace pycomm {

// Null where this host has no memfd or no abstract Unix sockets; `why` then says so.
// `heap` is shown to peers that have one themselves; it may be null.
std::unique_ptr<SocketTransport> make_shm(size_t ring_bytes, size_t memory_bytes, std::string& why,
                                          std::shared_ptr<SharedHeap> heap = {});

}  // namespace pycomm
