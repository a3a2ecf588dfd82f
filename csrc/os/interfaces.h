// This host's network interfaces and their addresses: which to listen on, and which to publish.
#pragma once

#include <string>
#include <vector>

#include "os/socket.h"

namespace pycomm::os {

// The addresses, without ports, that `choice` names: an interface ("eth1"), an address
// ("10.1.0.7"), a prefix ("10.1.0.0/16"), or a comma-separated list of these, of which the first
// that this host has is used. An interface may have several addresses. Throws InvalidArgument, with
// a list of the interfaces, if this host has none of them, or only a link-local address, which
// other hosts cannot use.
std::vector<Address> chosen_addresses(const std::string& choice);

// The addresses at which others may reach this host, likeliest first, without ports: the one from
// which it reaches the host `towards` (a name or address; empty: unknown), then the other global
// ones, IPv4 before IPv6, then the loopback addresses, for ranks of this host. Excludes interfaces
// that are down or unplugged, and link-local addresses.
std::vector<Address> offered_addresses(const std::string& towards);

// "lo (127.0.0.1, ::1), eth0 (10.1.0.7), eth1 (no address)"
std::string described_interfaces();

}  // namespace pycomm::os
