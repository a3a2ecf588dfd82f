// Closes a TCP connection such that its last bytes arrive.
//
// A TCP socket that is closed while bytes of the peer are unread, or arrive later, is reset: the
// kernel discards what it had not delivered yet. Therefore a thread, which exists only while there
// are such sockets, sends the unsent bytes, shuts down the sending side, and reads and drops what
// the peer still sends until the peer has received everything.
#pragma once

#include "os/fd.h"
#include "transport/transport.h"

namespace pycomm::transport {

// Takes a TCP socket and its unsent bytes; never blocks. The socket is closed once the peer's
// kernel has acknowledged everything, the peer has closed the connection, or 2 s have passed. The
// end of the process waits for these sockets, unless the process is killed or exits without running
// destructors.
void close_gracefully(os::Fd socket, ConstBytes unsent);

}  // namespace pycomm::transport
