#include "bootstrap/mesh.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "bootstrap/connector.h"
#include "bootstrap/forming.h"
#include "bootstrap/on_demand_connector.h"
#include "bootstrap/rank_info.h"
#include "core/sha256.h"
#include "engine/engine.h"
#include "os/process.h"
#include "os/random.h"
#include "transport/local.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace pycomm::bootstrap {
namespace {

// Up to this size, all rings that a rank reads use less than 8 MiB together. In larger groups,
// whose ranks connect on demand, rings do not shrink further.
constexpr int kManyRanks = 64;

// What a rank opens while a group forms: for each peer in another process a socket, a pidfd unless
// another group has it, and a ring until the peer has it; besides these a few for itself and the
// store, with some to spare for what other threads open meanwhile.
constexpr size_t kPeerDescriptors = 3, kDescriptors = 16;

size_t ring_bytes(int size) {
  const size_t peers = static_cast<size_t>(std::clamp(size, 2, kManyRanks)) - 1;
  return std::min(std::bit_floor((size_t{8} << 20) / peers), size_t{1} << 20);
}

class MeshBuilder {
 public:
  MeshBuilder(const MeshRequest& request, const Deadline& deadline)
      : request_(request), deadline_(deadline), info_(own_rank_info(request.host)) {}

  Mesh form(const Exchange& exchange) {
    const auto may = [&](std::string_view name) {
      return request_.transport.empty() || request_.transport == name;
    };
    std::string why;
    const bool full = request_.size <= std::max(1, request_.full_mesh);
    // The heaps of a very large group would not fit into the address space.
    if (request_.size > 1 && request_.shares && full) heap_ = os::SharedHeap::own();
    if (request_.size > 1 && may("shm"))
      shm_ = transport::make_shm(ring_bytes(request_.size), request_.memory_bytes, why, heap_);
    if (request_.size > 1 && may("tcp"))
      tcp_ = transport::make_tcp(request_.address, request_.towards);
    info_.options = request_.options;
    info_.tuned = request_.tuned;
    info_.memory = request_.shares ? std::to_string(request_.memory_bytes) : "0";
    info_.heap = std::to_string(heap_ ? heap_->view().bytes : 0);
    if (shm_) info_.shm = shm_->address();
    if (tcp_) info_.tcp = tcp_->address();
    info_.token = os::random_name();
    for (const std::string& text : exchange(encode(info_)))
      infos_.push_back(decode_rank_info(text));
    check_options();
    check_key();
    check_descriptors(full);
    Mesh mesh = describe();
    pick_transports(mesh, why, full);
    Connector::Options options{.rank = request_.rank,
                               .key = request_.key,
                               .context = context_of(infos_[0], request_.name),
                               .agreed = digest_of(infos_),
                               .transports = {},
                               .addresses = std::move(addresses_),
                               .forbidden_is_final = request_.forbidden != nullptr,
                               .log = request_.log};
    const auto own = shm_ ? shm_->memory() : nullptr;
    if (shm_) options.transports.push_back(std::move(shm_));
    if (tcp_) options.transports.push_back(std::move(tcp_));
    if (full) {
      connect_mesh(mesh, std::move(options));
      share(mesh, own);
    } else {
      mesh.connector =
          std::make_unique<OnDemandConnector>(std::move(options), ring_bytes(request_.size));
    }
    return mesh;
  }

 private:
  void check_options() const {
    for (size_t i = 0; i < infos_.size(); ++i)
      if (infos_[i].options != infos_[0].options)
        throw Mismatch("ranks were started with different options: rank 0 has " +
                           infos_[0].options + ", rank " + std::to_string(i) + " has " +
                           infos_[i].options,
                       {.op = "init", .rank = request_.rank, .peer = static_cast<int>(i)});
  }

  // All ranks reach the same result.
  void check_key() const {
    if (!request_.encrypt || !request_.open_key) return;
    for (const RankInfo& info : infos_)
      if (info.host_id != infos_[0].host_id)
        throw Unsupported(
            "encrypt=True on several hosts requires a secret that is not in the store: rank 0 "
            "stored a random one, because PYCOMM_SECRET is not set; set it to the same value on "
            "all hosts, for example from python -c \"import secrets; "
            "print(secrets.token_hex(32))\"",
            {.op = "init", .rank = request_.rank});
  }

  // Before any connection: a rank that then lacked descriptors could not tell its peers. All ranks
  // reach the same result.
  void check_descriptors(bool full) const {
    for (size_t i = 0; i < infos_.size(); ++i) {
      const RankInfo& info = infos_[i];
      size_t needed = request_.size > 1 ? kDescriptors : 0;
      for (size_t j = 0; full && j < infos_.size(); ++j)
        if (j != i && between(info, infos_[j]) != "local") needed += kPeerDescriptors;
      if (std::stoull(info.descriptors) >= needed) continue;
      const auto lacking = static_cast<int>(i);
      throw Unsupported("the group \"" + request_.name + "\" needs up to " +
                            std::to_string(needed) + " descriptors in each process, and " +
                            name(lacking) + " has " + info.descriptors + " of its " +
                            info.most_descriptors +
                            " left: too many open files; raise the limit there (ulimit -n), or "
                            "make fewer groups",
                        {.op = "init", .rank = request_.rank, .peer = lacking});
    }
  }

  Mesh describe() const {
    Mesh mesh;
    mesh.channels.resize(infos_.size());
    mesh.tuned = infos_[0].tuned;
    const Digest digest = sha256(context_of(infos_[0], request_.name));
    std::memcpy(&mesh.id, digest.data(), sizeof mesh.id);
    for (const RankInfo& info : infos_) {
      const bool visible = on_one_machine(info, info_) && info.pid_space == info_.pid_space;
      mesh.members.push_back({info.host, info.pid, "self", visible, visible ? info.started : 0});
      mesh.hosts.push_back(info.host_id);
    }
    return mesh;
  }

  std::string name(int peer) const {
    const RankInfo& info = infos_[static_cast<size_t>(peer)];
    return name_of(peer, {.host = info.host, .pid = info.pid, .transport = {}});
  }

  void pick_transports(Mesh& mesh, const std::string& why, bool full) {
    addresses_.resize(infos_.size());
    for (int peer = 0; peer < request_.size; ++peer) {
      if (peer == request_.rank) continue;
      const RankInfo& info = infos_[static_cast<size_t>(peer)];
      std::string& transport = mesh.members[static_cast<size_t>(peer)].transport;
      const std::string_view by_info = between(info, info_);
      if (by_info == "local") {
        transport = by_info;
        if (full) connect_thread(mesh, peer);
        continue;
      }
      transport::SocketTransport* by = by_info == "shm"   ? shm_.get()
                                       : info.tcp.empty() ? nullptr
                                                          : tcp_.get();
      if (by == nullptr)
        throw Unsupported("no transport reaches " + name(peer) +
                              (request_.transport.empty() ? "" : " by " + request_.transport) +
                              (why.empty() ? "" : ": " + why),
                          {.op = "init", .rank = request_.rank, .peer = peer});
      transport = by->name();
      auto theirs = candidates(*by, peer, request_.rank);
      if (theirs.empty() || candidates(*by, request_.rank, peer).empty())
        throw Unsupported(
            name(peer) + " and this rank are on different hosts, and the address of " +
                (theirs.empty() ? "that rank, " + info.tcp : "this rank, " + info_.tcp) +
                ", is unreachable from the other; choose another with GLOO_SOCKET_IFNAME",
            {.op = "init", .rank = request_.rank, .peer = peer});
      const bool leaves = info.host_id != info_.host_id;
      addresses_[static_cast<size_t>(peer)] = {by, std::move(theirs), name(peer),
                                               request_.encrypt && leaves};
    }
  }

  void connect_thread(Mesh& mesh, int peer) {
    const std::string mine = digest_of(infos_);
    std::string agreed = mine;
    mesh.channels[static_cast<size_t>(peer)] =
        transport::local_channel(context_of(infos_[0], request_.name), request_.rank, peer,
                                 ring_bytes(request_.size), &agreed);
    if (agreed != mine) different_ = peer;
  }

  // The addresses at which `dialer` may dial `listener`; one of them is this rank.
  std::vector<std::string> candidates(const transport::SocketTransport& by, int listener,
                                      int dialer) const {
    const RankInfo& to = infos_[static_cast<size_t>(listener)];
    const RankInfo& from = infos_[static_cast<size_t>(dialer)];
    return by.candidates(by.name() == "shm" ? to.shm : to.tcp, on_one_machine(to, from));
  }

  // Shares memory only if, on every host, all pairs have the same kind of memory and all ranks want
  // it. All ranks reach the same result. `own` is this rank's memory for other processes.
  void share(Mesh& mesh, const std::shared_ptr<std::byte>& own) const {
    for (const RankInfo& info : infos_)
      if (info.memory == "0" || info.memory != info_.memory) return;
    std::map<std::string, std::set<std::string_view>> by_host;
    for (size_t a = 0; a < infos_.size(); ++a)
      for (size_t b = 0; b < a; ++b)
        if (infos_[a].host_id == infos_[b].host_id)
          by_host[infos_[a].host_id].insert(between(infos_[a], infos_[b]));
    for (const auto& [host, transports] : by_host)
      if (transports.size() > 1 || transports.contains("tcp")) return;
    if (by_host.empty()) return;
    const bool local = by_host[info_.host_id].contains("local");
    for (size_t i = 0; i < infos_.size(); ++i) {
      const auto rank = static_cast<int>(i);
      if (infos_[i].host_id != info_.host_id)
        mesh.memories.push_back(nullptr);
      else if (local)
        mesh.memories.push_back(transport::local_memory(context_of(infos_[0], request_.name), rank,
                                                        request_.memory_bytes));
      else
        mesh.memories.push_back(rank == request_.rank ? own : mesh.channels[i]->memory());
    }
    share_heaps(mesh, local);
  }

  void share_heaps(Mesh& mesh, bool local) const {
    for (const RankInfo& info : infos_)
      if (info.heap == "0" || info.heap != info_.heap || info.host_id != info_.host_id) return;
    mesh.heap = heap_;
    for (size_t i = 0; i < infos_.size(); ++i) {
      const bool mine = local || static_cast<int>(i) == request_.rank;
      mesh.heaps.push_back(mine ? heap_->view() : mesh.channels[i]->heap());
      if (!mesh.heaps.back().base)
        throw_lost(static_cast<int>(i), " announced a heap but did not send it");
    }
  }

  // The transport between two ranks.
  std::string_view between(const RankInfo& a, const RankInfo& b) const {
    const bool local = request_.transport.empty() || request_.transport == "local";
    const bool one_host = a.host_id == b.host_id;
    if (one_host && a.process == b.process && local) return "local";
    return one_host && !a.shm.empty() && !b.shm.empty() ? "shm" : "tcp";
  }

  // A rank that cannot form the group sends the error to its connected peers: one of them may
  // already have a complete group.
  void connect_mesh(Mesh& mesh, Connector::Options request) {
    int lost = collectives::kNoRank;
    std::optional<Error> failure;
    try {
      lost = connect_all(mesh, std::move(request));
      if (lost == collectives::kNoRank) return;
    } catch (const Error& error) {
      failure = error;
    }
    engine::EngineOptions options{.rank = request_.rank, .names = {}, .interrupted = {}};
    for (int peer = 0; peer < request_.size; ++peer) options.names.push_back(name(peer));
    engine::Engine engine(std::move(mesh.channels), std::move(options));
    try {
      if (failure) throw Error(*failure);
      engine.throw_peer_error(lost);
    } catch (const Error& error) {
      ErrorFields fields = error.fields();
      fields.op = "init";
      fields.rank = request_.rank;
      const auto before = "the group \"" + request_.name + "\" did not form: ";
      const Error reported(error.kind(), (failure ? "" : before) + error.what(), fields);
      engine.fail(reported);
      throw reported;
    }
  }

  // By rank: the processes of the peers that are visible here.
  std::vector<os::Process> watch_processes(const Mesh& mesh) const {
    std::vector<os::Process> found;
    for (const Member& member : mesh.members)
      found.emplace_back(member.visible && member.pid != info_.pid ? member.pid : 0);
    return found;
  }

  // Carries out forming.h. Returns a rank that closed its connection again, or kNoRank.
  int connect_all(Mesh& mesh, Connector::Options request) {
    std::vector<int> missing;
    for (int peer = 0; peer < request_.size; ++peer)
      if (request.addresses[static_cast<size_t>(peer)].transport) missing.push_back(peer);
    Connector connector(std::move(request));
    const auto begin = Clock::now();
    Forming forming(request_.rank, std::move(missing), deadline_.left());
    if (different_ != collectives::kNoRank) forming.different(different_);
    std::vector<os::Process> processes = watch_processes(mesh);
    std::vector<engine::ConnectResult> results;
    for (;;) {
      const Forming::Time now = Clock::now() - begin;
      const auto [result, peer] = forming.verdict(now);
      switch (result) {
        case Forming::Result::waits:
          break;
        case Forming::Result::complete:
        case Forming::Result::closed:
          return peer;
        case Forming::Result::different:
          throw_different(peer);
        case Forming::Result::unreachable:
          throw_unreachable(mesh, results, peer);
        case Forming::Result::died:
          throw_lost(peer, " died while the group formed: its process has ended");
        case Forming::Result::interrupted:
          throw_interrupted();
        case Forming::Result::late:
          throw_missing(forming.missing(), connector);
      }
      for (const int other : forming.dials(now)) connector.dial(other, other < request_.rank);
      results = observe(mesh, connector, processes, forming, begin);
    }
  }

  // Waits for events, at most kPollInterval, and tells `forming`. Returns those of the connector.
  std::vector<engine::ConnectResult> observe(Mesh& mesh, Connector& connector,
                                             std::vector<os::Process>& processes, Forming& forming,
                                             Clock::time_point begin) {
    std::vector<transport::Channel*> met;
    std::vector<pollfd> also;
    for (const auto& channel : mesh.channels)
      if (channel && !channel->is_closed()) {
        met.push_back(channel.get());
        also.push_back(channel->arm({}));
      }
    for (const os::Process& process : processes) also.push_back({process.descriptor(), POLLIN, 0});
    const auto limit = std::min<std::chrono::nanoseconds>(kPollInterval, deadline_.left());
    auto results = connector.poll(limit, also);
    const Forming::Time now = Clock::now() - begin;
    for (size_t i = 0; i < processes.size(); ++i) {
      if (also[met.size() + i].revents != 0) processes[i].found_ended();
      if (processes[i].ended()) forming.ended(static_cast<int>(i), now);
    }
    for (size_t i = 0; i < met.size(); ++i) met[i]->disarm(also[i].revents);
    for (engine::ConnectResult& result : results) {
      auto& channel = mesh.channels[static_cast<size_t>(result.peer)] = std::move(result.channel);
      if (result.differs) forming.different(result.peer);
      if (channel) forming.connected(result.peer);
      if (!channel && !result.differs) forming.unreachable(result.peer);
    }
    if (request_.check_aborted) request_.check_aborted({});
    for (size_t i = 0; i < mesh.channels.size(); ++i)
      if (mesh.channels[i] && mesh.channels[i]->is_closed())
        forming.closed(static_cast<int>(i), now);
    // `interrupted` may take a contended lock, and unauthenticated clients can cause many rounds.
    const auto [result, cause] = forming.verdict(now);
    const bool waits = result == Forming::Result::waits && cause == collectives::kNoRank;
    if (waits && request_.interrupted && now - interrupts_checked_ >= kPollInterval) {
      interrupts_checked_ = now;
      if (request_.interrupted()) forming.interrupted();
    }
    return results;
  }

  [[noreturn]] void throw_lost(int peer, const std::string& what) const {
    throw PeerLost(name(peer) + what, {.op = "init", .rank = request_.rank, .peer = peer});
  }

  [[noreturn]] void throw_interrupted() const {
    throw GroupBroken("the group \"" + request_.name + "\" did not form: " + name(request_.rank) +
                          " was interrupted",
                      {.op = "init", .rank = request_.rank});
  }

  // `results`: one is of this peer.
  [[noreturn]] void throw_unreachable(const Mesh& mesh,
                                      const std::vector<engine::ConnectResult>& results,
                                      int peer) const {
    const auto& found = *std::ranges::find(results, peer, &engine::ConnectResult::peer);
    const bool inside = mesh.members[static_cast<size_t>(peer)].transport == "shm";
    if (found.forbidden && inside && request_.forbidden)
      request_.forbidden(name(peer) + " cannot be reached at " + found.why);
    throw PeerLost(name(peer) + " cannot be reached at " + found.why,
                   {.op = "init", .rank = request_.rank, .peer = peer, .unreachable = peer});
  }

  [[noreturn]] void throw_different(int peer) const {
    throw Mismatch("the group \"" + request_.name + "\" did not form: " + name(peer) + " and " +
                       name(request_.rank) +
                       " read different rank infos from the store (addresses, hosts, "
                       "thresholds); the store's contents changed meanwhile, or "
                       "another run uses it too",
                   {.op = "init", .rank = request_.rank, .peer = peer});
  }

  [[noreturn]] void throw_missing(const std::vector<int>& missing,
                                  const Connector& connector) const {
    std::string text = "the group \"" + request_.name + "\" did not form in " +
                       std::to_string(deadline_.limit_s()) + " s: no connection with ";
    for (const int peer : missing) {
      if (peer != missing[0]) text += ", ";
      text += name(peer) +
              (peer < request_.rank ? connector.failure(peer) : awaited_addresses(connector, peer));
    }
    throw Timeout(text, {.op = "init",
                         .rank = request_.rank,
                         .peer = missing.size() == 1 ? missing[0] : collectives::kNoRank,
                         .unreachable = missing[0]});
  }

  // For a rank that should have dialed this one: the addresses to dial.
  std::string awaited_addresses(const Connector& connector, int peer) const {
    std::string text = ", which did not connect to", between = " ";
    for (const std::string& address : candidates(connector.transport(peer), request_.rank, peer)) {
      text += between + address;
      between = " or ";
    }
    return text;
  }

  const MeshRequest& request_;
  const Deadline& deadline_;
  RankInfo info_;
  std::vector<RankInfo> infos_;
  std::shared_ptr<os::SharedHeap> heap_;
  std::unique_ptr<transport::SocketTransport> shm_, tcp_;
  std::vector<Connector::PeerAddress> addresses_;  // by rank
  int different_ = collectives::kNoRank;  // a rank of this process that read different infos
  Forming::Time interrupts_checked_ = -kPollInterval;  // last call of request_.interrupted
};

}  // namespace

Mesh form_mesh(const MeshRequest& request, const Exchange& exchange, const Deadline& deadline) {
  return MeshBuilder(request, deadline).form(exchange);
}

std::string name_of(int rank, const Member& member) {
  return "rank " + std::to_string(rank) + " (host " + member.host + ", pid " +
         std::to_string(member.pid) + ")";
}

}  // namespace pycomm::bootstrap
