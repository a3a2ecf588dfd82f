// Sees a connection off that this rank has done with, so that its last bytes arrive.
//
// A TCP socket that is closed while bytes of the peer are unread, or come later, is reset: the
// kernel throws away what it had not delivered yet. So the sending side is shut at once, and a
// thread, which is there only while it has something to do, reads and drops what the peer still
// sends until the peer has all of ours. Called by the TCP transport.
#pragma once

#include "os/fd.h"

namespace pycomm {

// Takes a TCP socket; never blocks. It is closed once the peer's kernel has acknowledged all that
// was sent, or the peer has hung up, or after 2 s. The end of the process waits for those that are
// on their way; a process that is killed, or leaves without running destructors, does not.
void see_off(Fd socket);

}  // namespace pycomm
