// Sees a connection off that this rank has done with, so that its last bytes arrive.
//
// A TCP socket that is closed while bytes of the peer are unread, or come later, is reset: the
// kernel throws away what it had not delivered yet. So a thread, which is there only while it has
// something to do, sends what is still unsent, shuts the sending side, and reads and drops what the
// peer still sends until the peer has all of ours. Called by the TCP transport.
#pragma once

#include "os/fd.h"
#include "transport/transport.h"

namespace pycomm {

// Takes a TCP socket, and what is to be sent by it yet; never blocks. It is closed once the peer's
// kernel has acknowledged all of that, or the peer has hung up, or after 2 s. The end of the
// process waits for those that are on their way; a process that is killed, or leaves without
// running destructors, does not.
void close_gracefully(Fd socket, ConstBytes unsent);

}  // namespace pycomm
