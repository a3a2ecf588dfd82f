#include "group/mesh.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "core/sha256.h"
#include "engine/engine.h"
#include "group/doorman.h"
#include "group/lobby.h"
#include "group/note.h"
#include "os/process.h"
#include "os/random.h"
#include "transport/local.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace pycomm {
namespace {

// No wait is longer, and `interrupted` is asked no more often: it may take a lock that others hold
// for long, and strangers can bring about many rounds.
constexpr std::chrono::milliseconds kSlice{100};

// For those who are about to be met when the forming has failed: much longer than a handshake
// takes.
constexpr std::chrono::milliseconds kLastMeetings{200};

// A rank that others should have called by now calls them: a firewall may let connections pass in
// one direction alone.
constexpr std::chrono::seconds kCallsBack{1};

// Up to so many ranks the rings that one reads stay under 8 MiB together; beyond, where a rank has
// rings to those that it has met, they are no smaller.
constexpr int kManyRanks = 64;

size_t ring_bytes(int size) {
  const size_t peers = static_cast<size_t>(std::clamp(size, 2, kManyRanks)) - 1;
  return std::min(std::bit_floor((size_t{8} << 20) / peers), size_t{1} << 20);
}

class Forming {
 public:
  Forming(const MeshRequest& request, const Deadline& deadline)
      : request_(request), deadline_(deadline), note_(my_note(request.host)) {}

  Mesh form(const Exchange& exchange) {
    const auto may = [&](std::string_view name) {
      return request_.transport.empty() || request_.transport == name;
    };
    std::string why;
    const bool full = request_.size <= std::max(1, request_.full_mesh);
    // Of very many ranks all heaps would not fit into the address space.
    if (request_.size > 1 && request_.shares && full) heap_ = SharedHeap::own();
    if (request_.size > 1 && may("shm"))
      shm_ = make_shm(ring_bytes(request_.size), request_.memory_bytes, why, heap_);
    if (request_.size > 1 && may("tcp")) tcp_ = make_tcp(request_.address, request_.towards);
    note_.options = request_.options;
    note_.tuned = request_.tuned;
    note_.memory = request_.shares ? std::to_string(request_.memory_bytes) : "0";
    note_.heap = std::to_string(heap_ ? heap_->view().bytes : 0);
    if (shm_) note_.shm = shm_->address();
    if (tcp_) note_.tcp = tcp_->address();
    for (const uint8_t byte : random_bytes()) note_.token += static_cast<char>('a' + byte % 16);
    for (const std::string& text : exchange(encode(note_))) notes_.push_back(decode_note(text));
    check_options();
    check_key();
    Mesh mesh = describe();
    pick_transports(mesh, why, full);
    Lobby::Request lobby{.rank = request_.rank,
                         .key = request_.key,
                         .context = context_of(notes_[0], request_.name),
                         .agreed = digest_of(notes_),
                         .transports = {},
                         .contacts = std::move(contacts_),
                         .forbidden_is_final = request_.forbidden != nullptr,
                         .log = request_.log};
    const auto own = shm_ ? shm_->memory() : nullptr;
    if (shm_) lobby.transports.push_back(std::move(shm_));
    if (tcp_) lobby.transports.push_back(std::move(tcp_));
    if (full) {
      meet(mesh, std::move(lobby));
      share(mesh, own);
    } else {
      mesh.connector = std::make_unique<Doorman>(std::move(lobby), ring_bytes(request_.size));
    }
    return mesh;
  }

 private:
  void check_options() const {
    for (size_t i = 0; i < notes_.size(); ++i)
      if (notes_[i].options != notes_[0].options)
        throw Mismatch("ranks were started with different options: rank 0 has " +
                           notes_[0].options + ", rank " + std::to_string(i) + " has " +
                           notes_[i].options,
                       {.op = "init", .rank = request_.rank, .peer = static_cast<int>(i)});
  }

  // All ranks find the same.
  void check_key() const {
    if (!request_.encrypt || !request_.open_key) return;
    for (const Note& note : notes_)
      if (note.host_id != notes_[0].host_id)
        throw Unsupported(
            "encrypt=True on several hosts needs a key that is not in the store: rank 0 left the "
            "run's key there, as there was no PYCOMM_SECRET; set it to the same value on all "
            "hosts, made by python -c \"import secrets; print(secrets.token_hex(32))\"",
            {.op = "init", .rank = request_.rank});
  }

  Mesh describe() const {
    Mesh mesh;
    mesh.channels.resize(notes_.size());
    mesh.tuned = notes_[0].tuned;
    const Digest digest = sha256(context_of(notes_[0], request_.name));
    std::memcpy(&mesh.id, digest.data(), sizeof mesh.id);
    for (const Note& note : notes_) {
      const bool visible = on_one_machine(note, note_) && note.pid_space == note_.pid_space;
      mesh.members.push_back(
          {note.host, note.pid, "self", visible, visible ? start_time(note.pid) : 0});
      mesh.hosts.push_back(note.host_id);
    }
    return mesh;
  }

  std::string name(int peer) const {
    const Note& note = notes_[static_cast<size_t>(peer)];
    return name_of(peer, {.host = note.host, .pid = note.pid, .transport = {}});
  }

  void pick_transports(Mesh& mesh, const std::string& why, bool full) {
    contacts_.resize(notes_.size());
    for (int peer = 0; peer < request_.size; ++peer) {
      if (peer == request_.rank) continue;
      const Note& note = notes_[static_cast<size_t>(peer)];
      std::string& transport = mesh.members[static_cast<size_t>(peer)].transport;
      const std::string_view by_note = between(note, note_);
      if (by_note == "local") {
        transport = by_note;
        if (full) meet_thread(mesh, peer);
        continue;
      }
      SocketTransport* by = by_note == "shm" ? shm_.get() : note.tcp.empty() ? nullptr : tcp_.get();
      if (by == nullptr)
        throw Unsupported("no transport reaches " + name(peer) +
                              (request_.transport.empty() ? "" : " by " + request_.transport) +
                              (why.empty() ? "" : ": " + why),
                          {.op = "init", .rank = request_.rank, .peer = peer});
      transport = by->name();
      auto theirs = ways(*by, peer, request_.rank);
      if (theirs.empty() || ways(*by, request_.rank, peer).empty())
        throw Unsupported(
            name(peer) + " and this rank are on different hosts, and the address of " +
                (theirs.empty() ? "the former, " + note.tcp : "this, " + note_.tcp) +
                ", cannot be reached from there; choose another by GLOO_SOCKET_IFNAME",
            {.op = "init", .rank = request_.rank, .peer = peer});
      const bool leaves = note.host_id != note_.host_id;
      contacts_[static_cast<size_t>(peer)] = {by, std::move(theirs), name(peer),
                                              request_.encrypt && leaves};
    }
  }

  void meet_thread(Mesh& mesh, int peer) {
    const std::string mine = digest_of(notes_);
    std::string agreed = mine;
    mesh.channels[static_cast<size_t>(peer)] =
        local_channel(context_of(notes_[0], request_.name), request_.rank, peer,
                      ring_bytes(request_.size), &agreed);
    if (agreed != mine) different_ = peer;
  }

  // The addresses by which a rank, this one or a peer of it, may call a peer, or this one.
  std::vector<std::string> ways(const SocketTransport& by, int listener, int caller) const {
    const Note& called = notes_[static_cast<size_t>(listener)];
    const Note& calling = notes_[static_cast<size_t>(caller)];
    return by.ways(by.name() == "shm" ? called.shm : called.tcp, on_one_machine(called, calling));
  }

  // Only where on every host all pairs have the same kind of memory, and all ranks want it, which
  // all ranks find alike. `own` is what this rank lays out for other processes.
  void share(Mesh& mesh, const std::shared_ptr<std::byte>& own) const {
    for (const Note& note : notes_)
      if (note.memory == "0" || note.memory != note_.memory) return;
    std::map<std::string, std::set<std::string_view>> by_host;
    for (size_t a = 0; a < notes_.size(); ++a)
      for (size_t b = 0; b < a; ++b)
        if (notes_[a].host_id == notes_[b].host_id)
          by_host[notes_[a].host_id].insert(between(notes_[a], notes_[b]));
    for (const auto& [host, ways] : by_host)
      if (ways.size() > 1 || ways.contains("tcp")) return;
    if (by_host.empty()) return;
    const bool local = by_host[note_.host_id].contains("local");
    for (size_t i = 0; i < notes_.size(); ++i) {
      const auto rank = static_cast<int>(i);
      if (notes_[i].host_id != note_.host_id)
        mesh.memories.push_back(nullptr);
      else if (local)
        mesh.memories.push_back(
            local_memory(context_of(notes_[0], request_.name), rank, request_.memory_bytes));
      else
        mesh.memories.push_back(rank == request_.rank ? own : mesh.channels[i]->memory());
    }
    share_heaps(mesh, local);
  }

  void share_heaps(Mesh& mesh, bool local) const {
    for (const Note& note : notes_)
      if (note.heap == "0" || note.heap != note_.heap || note.host_id != note_.host_id) return;
    mesh.heap = heap_;
    for (size_t i = 0; i < notes_.size(); ++i) {
      const bool mine = local || static_cast<int>(i) == request_.rank;
      mesh.heaps.push_back(mine ? heap_->view() : mesh.channels[i]->heap());
      if (!mesh.heaps.back().base)
        throw_lost(static_cast<int>(i), " gave no heap, which it said it has");
    }
  }

  // How two ranks reach each other, if at all.
  std::string_view between(const Note& a, const Note& b) const {
    const bool local = request_.transport.empty() || request_.transport == "local";
    const bool one_host = a.host_id == b.host_id;
    if (one_host && a.process == b.process && local) return "local";
    return one_host && !a.shm.empty() && !b.shm.empty() ? "shm" : "tcp";
  }

  // Who cannot form the group tells those that it has met: one of them may stand already.
  void meet(Mesh& mesh, Lobby::Request request) {
    int lost = kNoRank;
    std::optional<Error> failure;
    try {
      lost = meet_all(mesh, std::move(request));
      if (lost == kNoRank) return;
    } catch (const Error& error) {
      failure = error;
    }
    EngineOptions options{.rank = request_.rank, .names = {}, .interrupted = {}};
    for (int peer = 0; peer < request_.size; ++peer) options.names.push_back(name(peer));
    Engine engine(std::move(mesh.channels), std::move(options));
    try {
      if (failure) throw Error(*failure);
      engine.throw_peer_error(lost);
    } catch (const Error& error) {
      ErrorFields fields = error.fields();
      fields.op = "init";
      fields.rank = request_.rank;
      const auto before = "the group \"" + request_.name + "\" did not form: ";
      const Error told(error.kind(), (failure ? "" : before) + error.what(), fields);
      engine.fail(told);
      throw told;
    }
  }

  // The processes of the peers, by rank, as far as they can be seen, and the first that has ended.
  // None of them can be in the group any more; but whoever left in order has told those that it had
  // met, and they tell this rank, why: for that there is a moment.
  struct Ends {
    std::vector<Process> processes;
    int peer = kNoRank;
    std::optional<Deadline> last_word{};

    void note(std::span<const pollfd> polled) {
      for (size_t i = 0; i < processes.size(); ++i) {
        if (polled[i].revents != 0) processes[i].found_ended();
        if (!processes[i].ended() || last_word) continue;
        peer = static_cast<int>(i);
        last_word.emplace(kLastMeetings);
      }
    }
  };

  Ends watch_processes(const Mesh& mesh) const {
    Ends ends;
    for (const Member& member : mesh.members) {
      const bool seen = member.visible && member.pid != note_.pid;
      ends.processes.emplace_back(seen ? member.pid : 0);
    }
    return ends;
  }

  // Each calls those before it and is called by those behind it, until nobody is missing. Gives one
  // who has hung up again, or kNoRank. For whom one more step is missing the group may stand
  // already, so those who are about to be met are met first: they have to be told.
  int meet_all(Mesh& mesh, Lobby::Request request) {
    std::vector<int> missing;
    for (int peer = 0; peer < request_.size; ++peer)
      if (request.contacts[static_cast<size_t>(peer)].transport) missing.push_back(peer);
    Lobby lobby(std::move(request));
    for (const int peer : missing)
      if (peer < request_.rank) lobby.call(peer);
    if (different_ != kNoRank) throw_different(different_);
    Ends ends = watch_processes(mesh);
    int lost = kNoRank;
    std::optional<Deadline> last_meetings;
    const Deadline awaited(kCallsBack);
    bool calls_back = false;
    while (!missing.empty()) {
      if (!calls_back && awaited.expired()) {
        calls_back = true;
        for (const int peer : missing)
          if (peer > request_.rank) lobby.call(peer, false);
      }
      std::vector<Channel*> met;
      std::vector<pollfd> also;
      for (const auto& channel : mesh.channels)
        if (channel && !channel->is_closed()) {
          met.push_back(channel.get());
          also.push_back(channel->arm({}));
        }
      const size_t first_process = also.size();
      for (const Process& process : ends.processes)
        also.push_back({process.descriptor().get(), POLLIN, 0});
      const auto limit = std::min<std::chrono::nanoseconds>(kSlice, deadline_.left());
      auto arrivals = lobby.round(limit, also);
      ends.note(std::span(also).subspan(first_process));
      for (size_t i = 0; i < met.size(); ++i) met[i]->disarm(also[i].revents);
      for (ConnectResult& arrival : arrivals) {
        mesh.channels[static_cast<size_t>(arrival.peer)] = std::move(arrival.channel);
        std::erase(missing, arrival.peer);
      }
      if (request_.heed) request_.heed({});
      for (const ConnectResult& arrival : arrivals)
        if (arrival.differs) throw_different(arrival.peer);
      for (const ConnectResult& arrival : arrivals)
        if (lost == kNoRank && !mesh.channels[static_cast<size_t>(arrival.peer)]) {
          const bool inside = mesh.members[static_cast<size_t>(arrival.peer)].transport == "shm";
          if (arrival.forbidden && inside && request_.forbidden)
            request_.forbidden(name(arrival.peer) + " cannot be reached at " + arrival.why);
          throw_unreachable(arrival.peer, arrival.why);
        }
      for (size_t i = 0; i < mesh.channels.size(); ++i)
        if (lost == kNoRank && mesh.channels[i] && mesh.channels[i]->is_closed()) {
          lost = static_cast<int>(i);
          last_meetings.emplace(kLastMeetings);
        }
      if (lost != kNoRank && last_meetings->expired()) return lost;
      if (lost == kNoRank && ends.last_word && ends.last_word->expired())
        throw_lost(ends.peer, " died while the group formed: its process has ended");
      if (lost == kNoRank && !missing.empty()) check_world(missing, lobby);
    }
    return lost;
  }

  void check_world(const std::vector<int>& missing, const Lobby& lobby) {
    if (request_.interrupted && Clock::now() - asked_ >= kSlice) {
      asked_ = Clock::now();
      if (request_.interrupted())
        throw GroupBroken("the group \"" + request_.name +
                              "\" did not form: " + name(request_.rank) + " was interrupted",
                          {.op = "init", .rank = request_.rank});
    }
    if (deadline_.expired()) throw_missing(missing, lobby);
  }

  [[noreturn]] void throw_lost(int peer, const std::string& what) const {
    throw PeerLost(name(peer) + what, {.op = "init", .rank = request_.rank, .peer = peer});
  }

  [[noreturn]] void throw_unreachable(int peer, const std::string& why) const {
    throw PeerLost(name(peer) + " cannot be reached at " + why,
                   {.op = "init", .rank = request_.rank, .peer = peer, .unreachable = peer});
  }

  [[noreturn]] void throw_different(int peer) const {
    throw Mismatch("the group \"" + request_.name + "\" did not form: " + name(peer) + " and " +
                       name(request_.rank) +
                       " were given different notes of the group's ranks (addresses, hosts, "
                       "thresholds); the store that passes the notes on was changed meanwhile, or "
                       "another run uses it too",
                   {.op = "init", .rank = request_.rank, .peer = peer});
  }

  [[noreturn]] void throw_missing(const std::vector<int>& missing, const Lobby& lobby) const {
    std::string text = "the group \"" + request_.name + "\" did not form in " +
                       std::to_string(deadline_.limit_s()) + " s: no connection with ";
    for (const int peer : missing) {
      if (peer != missing[0]) text += ", ";
      text += name(peer) + (peer < request_.rank ? lobby.failure(peer) : call_awaited(lobby, peer));
    }
    throw Timeout(text, {.op = "init",
                         .rank = request_.rank,
                         .peer = missing.size() == 1 ? missing[0] : kNoRank,
                         .unreachable = missing[0]});
  }

  // Of a rank that was to call us: by which addresses.
  std::string call_awaited(const Lobby& lobby, int peer) const {
    std::string text = ", which did not call", between = " ";
    for (const std::string& way : ways(lobby.transport(peer), request_.rank, peer)) {
      text += between + way;
      between = " or ";
    }
    return text;
  }

  const MeshRequest& request_;
  const Deadline& deadline_;
  Note note_;
  std::vector<Note> notes_;
  std::shared_ptr<SharedHeap> heap_;
  std::unique_ptr<SocketTransport> shm_, tcp_;
  std::vector<Lobby::Contact> contacts_;  // by rank
  int different_ = kNoRank;               // a thread of this process that was given other notes
  Clock::time_point asked_{};             // when request_.interrupted was asked last
};

}  // namespace

Mesh form_mesh(const MeshRequest& request, const Exchange& exchange, const Deadline& deadline) {
  return Forming(request, deadline).form(exchange);
}

std::string name_of(int rank, const Member& member) {
  return "rank " + std::to_string(rank) + " (host " + member.host + ", pid " +
         std::to_string(member.pid) + ")";
}

}  // namespace pycomm
