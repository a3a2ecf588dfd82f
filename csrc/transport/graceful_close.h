// Closes a connection that this rank no longer needs so that its last bytes arrive.
//
// A TCP socket that is closed while bytes of the peer are unread, or arrive later, is reset: the
// kernel discards what it had not delivered yet. A thread, which exists only while it has something
// to do, therefore sends what is unsent, shuts the sending side, and reads and drops what the peer
// still sends until the peer has received everything. Called by the TCP transport.
#pragma once

#include "os/fd.h"
#include "transport/transport.h"

namespace pycomm {

// Takes a TCP socket, and what is to be sent by it yet; never blocks. It is closed once the peer's
// kernel has acknowledged all of that, or the peer has closed the connection, or after 2 s. The end
// of the process waits for those that are on their way; a process that is killed, or leaves without
// running destructors, does not.
void close_gracefully(Fd socket, ConstBytes unsent);

}  // namespace pycomm
