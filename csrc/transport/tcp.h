// Processes of different hosts, or of one where shared memory is not to be had.
#pragma once

#include "transport/transport.h"

namespace pycomm {

// Listens on `address`, a name or number of this host; empty: on every IPv4 interface, and peers
// are told this host's first global address.
std::unique_ptr<SocketTransport> make_tcp(const std::string& address);

}  // namespace pycomm
