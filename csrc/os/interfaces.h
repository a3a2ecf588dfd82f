// This host's network interfaces and their addresses: which to listen on, and which to tell others.
// Nothing here opens a connection. Called by the TCP transport.
#pragma once

#include <string>
#include <vector>

#include "os/socket.h"

namespace pycomm {

// The addresses, without ports, that `choice` names: an interface ("eth1"), an address
// ("10.1.0.7"), a prefix ("10.1.0.0/16"), or a list of those with commas between them, of which the
// first that this host has counts. An interface may have several. Throws InvalidArgument, listing
// what there is, where this host has none of them, or only a link-local one, which other hosts
// cannot use.
std::vector<Address> chosen_addresses(const std::string& choice);

// The addresses by which others may reach this host, likeliest first, without ports: the one from
// which it reaches the host `towards` (a name or address; empty: unknown), the other global ones,
// IPv4 before IPv6, and at the end the loopback's, for ranks of this host. Interfaces that are down
// or unplugged and link-local addresses are left out.
std::vector<Address> offered_addresses(const std::string& towards);

// "lo (127.0.0.1, ::1), eth0 (10.1.0.7), eth1 (no address)"
std::string described_interfaces();

}  // namespace pycomm
