// The transport between hosts, and within a host where shared memory is not available.
#pragma once

#include "transport/transport.h"

namespace pycomm::transport {

// Listens on, and connects from, only the interfaces of this host that `choice` names
// (os/interfaces.h). `towards` is the host of rank 0; empty: unknown. With an empty choice: if
// `towards` is a loopback address or "localhost", all ranks run on this host, and only that address
// is used. Else it listens on every interface, IPv6 and IPv4, and publishes all addresses, first
// the one from which this host reaches `towards`. Throws InvalidArgument.
std::unique_ptr<SocketTransport> make_tcp(const std::string& choice, const std::string& towards);

}  // namespace pycomm::transport
