// Processes of different hosts, or of one where shared memory is not to be had.
#pragma once

#include "transport/transport.h"

namespace pycomm {

// Listens on, and connects from, what `choice` names of this host's interfaces
// (os/interfaces.h), and nothing else. An empty choice: where `towards`, the host of rank 0 (empty:
// unknown), is a loopback address or "localhost", all ranks run on this host and it listens on that
// address alone. Else it listens on every interface, of IPv6 and IPv4, and peers are told all
// addresses, first the one from which this host reaches `towards`. Throws InvalidArgument.
std::unique_ptr<SocketTransport> make_tcp(const std::string& choice, const std::string& towards);

}  // namespace pycomm
