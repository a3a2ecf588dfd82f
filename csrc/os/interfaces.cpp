// See interfaces.h.
#include "os/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <memory>
#include <sstream>

#include "core/errors.h"

namespace pycomm::os {
namespace {

// Maximum number of published addresses: a host may have hundreds, and a rank info has 4 KiB.
constexpr size_t kMostOffered = 8;

// One address of one interface; an interface without addresses has one entry without an address.
struct Entry {
  std::string interface;
  unsigned flags = 0;
  Address address{};

  bool has_address() const { return address.length != 0; }
  bool is_up() const { return (flags & IFF_UP) != 0; }
};

std::vector<Entry> entries() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw_errno("listing the network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(first, ::freeifaddrs);
  std::vector<Entry> found;
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    Entry entry{at->ifa_name, at->ifa_flags};
    const int family = at->ifa_addr == nullptr ? AF_UNSPEC : at->ifa_addr->sa_family;
    if (family == AF_INET) entry.address.length = sizeof(sockaddr_in);
    if (family == AF_INET6) entry.address.length = sizeof(sockaddr_in6);
    if (entry.has_address())
      std::memcpy(&entry.address.storage, at->ifa_addr, entry.address.length);
    found.push_back(std::move(entry));
  }
  return found;
}

// The 4 or 16 bytes of an address.
std::string bytes_of(const Address& address) {
  const auto* start = reinterpret_cast<const char*>(&address.storage);
  if (address.storage.ss_family == AF_INET)
    return {start + offsetof(sockaddr_in, sin_addr), sizeof(in_addr)};
  return {start + offsetof(sockaddr_in6, sin6_addr), sizeof(in6_addr)};
}

bool same_bits(const std::string& a, const std::string& b, size_t bits) {
  if (a.size() != b.size() || bits > 8 * a.size()) return false;
  for (size_t i = 0; i < bits; ++i) {
    const int shift = 7 - static_cast<int>(i % 8);
    if (((a[i / 8] >> shift) & 1) != ((b[i / 8] >> shift) & 1)) return false;
  }
  return true;
}

// Whether a word of the choice names this entry.
bool is_named(const Entry& entry, const std::string& word) {
  if (!entry.has_address()) return false;
  if (entry.interface == word) return true;
  const auto slash = word.find('/');
  const std::string literal = word.substr(0, std::min(slash, word.find('%')));
  std::array<char, sizeof(in6_addr)> raw{};
  const bool ipv6 = literal.find(':') != std::string::npos;
  if (::inet_pton(ipv6 ? AF_INET6 : AF_INET, literal.c_str(), raw.data()) != 1) return false;
  const std::string wanted(raw.data(), ipv6 ? sizeof(in6_addr) : sizeof(in_addr));
  size_t bits = 8 * wanted.size();
  if (slash != std::string::npos) {
    const char* end = word.data() + word.size();
    const auto read = std::from_chars(word.data() + slash + 1, end, bits);
    if (read.ec != std::errc{} || read.ptr != end) return false;
  }
  return same_bits(bytes_of(entry.address), wanted, bits);
}

bool is_global(const Address& address) {
  return !address.is_loopback() && !address.is_link_local();
}

}  // namespace

std::vector<Address> chosen_addresses(const std::string& choice) {
  const auto all = entries();
  bool only_link_local = false;
  std::istringstream words(choice);
  for (std::string word; std::getline(words, word, ',');) {
    std::vector<Address> chosen;
    for (const Entry& entry : all)
      if (is_named(entry, word) && entry.is_up() && !entry.address.is_link_local())
        chosen.push_back(entry.address);
    if (!chosen.empty()) return chosen;
    only_link_local |= std::ranges::any_of(all, [&](const Entry& entry) {
      return is_named(entry, word) && entry.address.is_link_local();
    });
  }
  throw InvalidArgument("GLOO_SOCKET_IFNAME is '" + choice + "', which " +
                        (only_link_local ? "is a link-local address that other hosts cannot use"
                                         : "names no interface that is up and no address of one") +
                        "; this host has " + described_interfaces());
}

std::vector<Address> offered_addresses(const std::string& towards) {
  std::vector<Address> offered;
  const auto offer = [&](const Address& address) {
    const auto same = [&](const Address& other) { return other.text() == address.text(); };
    if (std::ranges::none_of(offered, same)) offered.push_back(address);
  };
  try {
    if (Address source;
        !towards.empty() && source_towards(tcp_address(towards, 0), source) && is_global(source))
      offer(source);
  } catch (const InvalidArgument&) {  // the name cannot be resolved here: use the interfaces only
  }
  const auto all = entries();
  for (const int family : {AF_INET, AF_INET6})
    for (const Entry& entry : all)
      if (entry.address.storage.ss_family == family && entry.is_up() &&
          (entry.flags & IFF_RUNNING) != 0 && is_global(entry.address) &&
          offered.size() < kMostOffered)
        offer(entry.address);
  for (const Entry& entry : all)
    if (entry.is_up() && entry.address.is_loopback()) offer(entry.address);
  return offered;
}

std::string described_interfaces() {
  const auto all = entries();
  std::vector<std::string> names;
  for (const Entry& entry : all)
    if (std::ranges::find(names, entry.interface) == names.end()) names.push_back(entry.interface);
  std::string text;
  for (const std::string& name : names) {
    std::string inside;
    for (const Entry& entry : all) {
      if (entry.interface != name) continue;
      if (!entry.is_up()) {
        inside = "down";
        break;
      }
      if (entry.has_address()) inside += (inside.empty() ? "" : ", ") + entry.address.host();
    }
    text +=
        (text.empty() ? "" : ", ") + name + " (" + (inside.empty() ? "no address" : inside) + ")";
  }
  return text;
}

}  // namespace pycomm::os
