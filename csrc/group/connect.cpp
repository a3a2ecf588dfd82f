#include "group/connect.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "group/host_group.h"
#include "group/info_exchange.h"
#include "group/tcp_fallback.h"
#include "os/aes_gcm.h"
#include "os/interfaces.h"
#include "os/random.h"
#include "shared/segment.h"

namespace pycomm::group {
namespace {

constexpr size_t kMostHostName = 12;  // the size of the flight record's field

// How long a rank that cannot form the group waits until all ranks have found out.
constexpr std::chrono::seconds kAllReadTime{10};

// How long to wait for an error of the parent group after a rank was lost: the kernel closes the
// connections of a dead process one after the other. Another thread may also use the parent group
// at the same time and receive the error first.
constexpr std::chrono::milliseconds kFinalPollTimeout{100};

void check_options(const ConnectOptions& options) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("init: " + why, {.op = "init"});
  };
  if (options.size < 1)
    refuse("invalid size " + std::to_string(options.size) + ": it must be at least 1");
  if (options.rank < 0 || options.rank >= options.size)
    refuse("invalid rank " + std::to_string(options.rank) + " in a group of size " +
           std::to_string(options.size));
  if (options.timeout.count() <= 0) refuse("invalid timeout: it must be longer than 0 s");
  const auto& by = options.transport;
  if (!by.empty() && by != "local" && by != "shm" && by != "tcp")
    refuse("unknown transport \"" + by + "\"; expected local, shm or tcp");
  const auto& host = options.host;
  if (host.size() > kMostHostName ||
      !std::ranges::all_of(host, [](unsigned char c) { return std::isalnum(c) != 0; }))
    refuse("invalid name of a simulated host: expected up to " + std::to_string(kMostHostName) +
           " letters and digits, got \"" + host + "\"");
  check_address(options.address);
  observe::check_files(options.recorder);
  if (options.encrypt) (void)os::crypto_library();
}

// Logs one line on rank 0: ranks, hosts and transports.
void log_formed(const Group& group, const ConnectOptions& options) {
  if (!options.log || options.rank != 0) return;
  std::map<std::string, int> peers;
  for (const Member& member : group.info().members) ++peers[member.transport];
  peers.erase("self");
  std::string by;
  for (const auto& [transport, count] : peers)
    by += (by.empty() ? "" : ", ") + std::to_string(count) + " peers by " + transport;
  options.log("group \"" + options.name + "\": " + std::to_string(options.size) + " ranks on " +
              std::to_string(group.info().host_count) + " hosts; rank 0 is local rank " +
              std::to_string(group.info().local_rank) + " of " +
              std::to_string(group.info().local_size) + " on " + group.info().members[0].host +
              (by.empty() ? "" : ", " + by) + "; algorithm by size" +
              (options.reproducible ? ", sums in rank order" : "") +
              (options.encrypt && group.info().host_count > 1 ? ", encrypted between hosts" : ""));
}

// No rank continues or leaves before all are connected: until then a closed connection means that
// the peer died. Returns the longest round trip of all ranks.
std::chrono::microseconds wait_for_all(Group& group, std::chrono::microseconds round_trip,
                                       const Deadline& deadline) {
  const bool several_hosts = group.info().host_count > 1;
  int64_t longest = round_trip.count();
  group.run({.operation = several_hosts ? Operation::all_reduce : Operation::barrier,
             .dtype = Dtype::int64,
             .op = ReduceOp::max,
             .input = &longest,
             .output = &longest,
             .count = several_hosts ? size_t{1} : 0,
             .timeout = std::max<std::chrono::nanoseconds>(deadline.left(),
                                                           std::chrono::milliseconds(1))});
  return std::chrono::microseconds(longest);
}

std::shared_ptr<Group> form(const ConnectOptions& options, const bootstrap::Exchange& exchange,
                            std::vector<int> ranks, const bootstrap::CheckAborted& check_aborted) {
  const Deadline deadline(options.timeout);
  bootstrap::MeshRequest request{
      .rank = options.rank,
      .size = options.size,
      .name = options.name,
      .host = options.host,
      .key = options.secret,
      .transport = options.transport,
      .address = options.address,
      .towards = options.towards,
      .memory_bytes = sizeof(shared::Segment),
      // Faults and rate limits apply to channels only, so shared memory must be off.
      .shares = !options.wrap.inject_faults && !options.wrap.limit_rate,
      .encrypt = options.encrypt,
      .open_key = options.open_key,
      .options = "size=" + std::to_string(options.size) +
                 (options.reproducible ? ", reproducible=True" : ", reproducible=False") +
                 (options.encrypt ? ", encrypt=True" : ", encrypt=False") + ", heartbeat_s=" +
                 std::to_string(std::chrono::duration<double>(options.heartbeat).count()) +
                 ", full_mesh=" + std::to_string(options.full_mesh),
      .tuned = options.tuned,
      .full_mesh = options.full_mesh,
      .interrupted = options.interrupted,
      .log = options.log,
      .check_aborted = check_aborted,
      .forbidden = options.forbidden};
  const bootstrap::Exchange read = [&](const std::string& mine) {
    auto infos = exchange(mine);
    request.key = options.secret;  // which the exchange may have transmitted
    return infos;
  };
  bootstrap::Mesh mesh = bootstrap::form_mesh(request, read, deadline);
  for (const ChannelWrapper& wrap : {options.wrap.limit_rate, options.wrap.inject_faults})
    for (size_t i = 0; wrap && i < mesh.channels.size(); ++i)
      if (auto& channel = mesh.channels[i]) channel = wrap(std::move(channel), static_cast<int>(i));
  // A channel between two threads exists before the other thread arrives, if it ever does.
  const auto elsewhere = std::make_shared<bootstrap::CheckAborted>(check_aborted);
  ConnectOptions checking = options;
  checking.interrupted = [elsewhere, ask = options.interrupted] {
    if (*elsewhere) (*elsewhere)({});
    return ask && ask();
  };
  std::chrono::microseconds round_trip{0};
  for (const auto& channel : mesh.channels)
    if (channel) round_trip = std::max(round_trip, channel->round_trip());
  auto group = std::make_shared<HostGroup>(checking, std::move(mesh), std::move(ranks));
  const auto slowest = wait_for_all(*group, round_trip, deadline);
  *elsewhere = {};
  group->complete(slowest);
  log_formed(*group, options);
  return group;
}

}  // namespace

void check_address(const std::string& address) {
  if (!address.empty()) (void)os::chosen_addresses(address);
}

std::shared_ptr<Group> make_group(const ConnectOptions& options,
                                  const bootstrap::Exchange& exchange, std::vector<int> ranks,
                                  const bootstrap::CheckAborted& check_aborted) {
  std::optional<Error> ended;  // from the parent group, so its rank numbers differ
  const auto check_failed = [&](std::chrono::nanoseconds limit) {
    try {
      if (check_aborted && !ended) check_aborted(limit);
    } catch (const Error& error) {  // thrown below, and sent to the peers
      ended = error;
    }
    return ended.has_value();
  };
  const bootstrap::CheckAborted check_once = [&](std::chrono::nanoseconds limit) {
    if (check_failed(limit)) throw Error(ended->kind(), ended->what(), {});
  };
  bool exchanged = false;  // if not, the error of the exchange is the cause
  const bootstrap::Exchange infos = [&](const std::string& mine) {
    auto all = exchange(mine);
    exchanged = true;
    return all;
  };
  try {
    return form(options, infos, std::move(ranks), check_once);
  } catch (const Error& error) {
    if (!exchanged) throw;
    // A peer that left may have received the error of the parent group before this rank. A peer
    // that died is lost to the parent group too.
    if (error.kind() == ErrorKind::peer_lost ? check_failed(kFinalPollTimeout) : ended.has_value())
      throw *ended;
    throw;
  }
}

namespace {

std::shared_ptr<Group> form_through_store(rendezvous::Store& store, ConnectOptions options,
                                          const std::string& keys, std::vector<int> ranks,
                                          bool made_key, const Deadline& deadline) {
  if (made_key) {
    const auto bytes = os::random_bytes();
    store.set(key_of_secret(keys), std::string(bytes.begin(), bytes.end()), deadline);
  }
  options.open_key = options.open_key || options.secret.empty();
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(options.size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return make_group(
      options,
      [&](const std::string& mine) {
        auto [infos, secret] = exchange_infos(store, options, keys, mine, deadline);
        options.secret = secret;
        return infos;
      },
      std::move(ranks));
}

// If the rank infos make forming impossible, all ranks find that out from the same infos: no rank
// removes its own, or closes the store, before all have read them. Returns false if some ranks did
// not report the failure.
bool all_have_read(rendezvous::Store& store, const ConnectOptions& options, const std::string& keys,
                   const Deadline& deadline) {
  const std::string count = keys + "/refused", all = count + "/all";
  const Deadline limit(std::min<std::chrono::nanoseconds>(kAllReadTime, deadline.left()));
  bool read = store.add(count, 1, deadline) >= options.size;
  // Counts again in each slice: ranks may disagree about the size, and the smallest one ends it.
  while (!read && !limit.expired() && !(options.interrupted && options.interrupted())) {
    try {
      (void)store.get(all,
                      Deadline(std::min<std::chrono::nanoseconds>(kPollInterval, limit.left())));
      read = true;
    } catch (const Timeout&) {
      read = store.add(count, 0, deadline) >= options.size;
    }
  }
  if (read) store.set(all, "1", deadline);
  const Deadline clean_up(std::max<std::chrono::nanoseconds>(deadline.left(), kCleanUpTime));
  if (store.add(count, -1, clean_up) == 0) {
    store.remove(count, clean_up);
    store.remove(all, clean_up);
  }
  return read;
}

}  // namespace

// Each rank counts in the store how often it formed a group of this name. The count is part of the
// keys, so no rank reads keys of an earlier group. A failed attempt does not count unless all ranks
// failed alike: otherwise the first rank to retry would read the infos of the last one to fail.
// With `keys` nothing is counted.
std::shared_ptr<Group> connect(rendezvous::Store& store, ConnectOptions options,
                               std::vector<int> ranks, std::string keys) {
  check_options(options);
  if (options.size == 1)  // needs no store, in which its keys would stay
    return make_group(
        options, [](const std::string& mine) { return std::vector{mine}; },
        ranks.empty() ? std::vector{0} : std::move(ranks));
  const Deadline deadline(options.timeout);
  const std::string name = options.name;
  const std::string counter = name + "/formed/" + std::to_string(options.rank);
  const bool counts = keys.empty();
  const int64_t formed = counts ? store.add(counter, 1, deadline) : 1;
  if (formed > 1) options.name += "#" + std::to_string(formed);
  if (counts) keys = options.name;
  const bool made_key = options.secret.empty() && options.size > 1 && options.rank == 0;
  const auto clean_up = [&](bool infos, const Deadline& limit) {
    if (made_key) store.remove(key_of_secret(keys), limit);
    if (infos) remove_infos(store, options, keys, limit);
  };
  const std::string fallback_key = keys + "/by tcp";
  const auto fallback = std::make_shared<TcpFallbackFlag>(store, fallback_key);
  ConnectOptions watching = options;
  const bool may_use_tcp = options.size > 1 && options.transport.empty();
  if (may_use_tcp) {
    watching.forbidden = [fallback](const std::string& why) { fallback->set(why); };
    watching.interrupted = [fallback, ask = options.interrupted] {
      return fallback->is_set(false) || (ask && ask());
    };
  }
  std::shared_ptr<Group> group;
  bool by_tcp = false;
  try {
    group = form_through_store(store, watching, keys, ranks, made_key, deadline);
  } catch (const std::exception& error) {
    try {
      by_tcp = may_use_tcp && !deadline.expired() && fallback->is_set(true);
      const auto* ours = dynamic_cast<const Error*>(&error);
      const bool refused = ours != nullptr && (ours->kind() == ErrorKind::mismatch ||
                                               ours->kind() == ErrorKind::unsupported);
      const bool alike = refused && all_have_read(store, options, keys, deadline);
      const Deadline limit(std::max<std::chrono::nanoseconds>(deadline.left(), kCleanUpTime));
      clean_up(true, limit);
      if (counts && !alike && !by_tcp) store.add(counter, -1, limit);
    } catch (const std::exception&) {  // the store may be the cause; report the first error
      by_tcp = false;
    }
    if (!by_tcp) throw;
  }
  fallback->end();
  if (by_tcp) {
    if (options.log) options.log(fallback->why() + ": all ranks use TCP");
    options.name = name;
    options.transport = "tcp";
    options.timeout = deadline.left();
    group = connect(store, options, std::move(ranks), counts ? "" : keys + "/tcp");
    if (options.rank == 0) store.remove(fallback_key, Deadline(kCleanUpTime));
    return group;
  }
  try {
    // All ranks have read the keys: the barrier that ends forming is complete.
    const Deadline limit(std::max<std::chrono::nanoseconds>(deadline.left(), kCleanUpTime));
    clean_up(counts && store.limited(), limit);
  } catch (const PeerLost&) {  // rank 0 left and closed its store
  }
  return group;
}

}  // namespace pycomm::group
