#include "group/mesh.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <list>
#include <utility>

#include "group/note.h"
#include "os/random.h"
#include "os/socket.h"
#include "transport/handshake.h"
#include "transport/local.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace pycomm {
namespace {

// Unauthenticated connections held at once: strangers beyond it push out the oldest.
constexpr size_t kMaxStrangers = 64;
constexpr std::chrono::milliseconds kSlice{100}, kRetry{50};
constexpr int kRefusals = 100;  // by one peer, before it is believed: 5 s

// A rank holds one ring for each peer; together they stay under 8 MiB, however many ranks there
// are.
size_t ring_bytes(int size) {
  const size_t share = (size_t{8} << 20) / static_cast<size_t>(std::max(1, size - 1));
  return std::clamp(std::bit_floor(share), size_t{64} << 10, size_t{1} << 20);
}

class Forming {
 public:
  Forming(const MeshRequest& request, const Deadline& deadline)
      : request_(request), deadline_(deadline), note_(my_note()) {}

  Mesh form(const Exchange& exchange) {
    const auto may = [&](std::string_view name) {
      return request_.transport.empty() || request_.transport == name;
    };
    std::string why;
    if (request_.size > 1 && may("shm")) shm_ = make_shm(ring_bytes(request_.size), why);
    if (request_.size > 1 && may("tcp")) tcp_ = make_tcp(request_.address, request_.towards);
    note_.options = request_.options;
    if (shm_) note_.shm = shm_->address();
    if (tcp_) note_.tcp = tcp_->address();
    for (const uint8_t byte : random_bytes()) note_.token += static_cast<char>('a' + byte % 16);
    for (const std::string& text : exchange(encode(note_))) notes_.push_back(decode_note(text));
    check_options();
    Mesh mesh = describe();
    pick_transports(mesh, why);
    meet(mesh);
    return mesh;
  }

 private:
  struct Caller {  // a peer that we call
    int peer;
    std::vector<std::string> ways;  // tried in turn
    size_t way = 0;
    std::unique_ptr<Handshake> handshake{};
    Handshake::Step step = Handshake::Step::want_write;
    Clock::time_point retry_at{};
    int refusals = 0;
    std::string why{};
  };
  struct Stranger {  // somebody who called us
    SocketTransport* transport;
    Handshake handshake;
    Handshake::Step step = Handshake::Step::want_read;
  };
  struct Met {
    SocketTransport* transport = nullptr;
    Fd fd;
  };

  void check_options() const {
    for (size_t i = 0; i < notes_.size(); ++i)
      if (notes_[i].options != notes_[0].options)
        throw Mismatch("ranks were started with different options: rank 0 has " +
                           notes_[0].options + ", rank " + std::to_string(i) + " has " +
                           notes_[i].options,
                       {.op = "init", .rank = request_.rank, .peer = static_cast<int>(i)});
  }

  Mesh describe() const {
    Mesh mesh;
    mesh.channels.resize(notes_.size());
    for (const Note& note : notes_) {
      mesh.members.push_back({note.host, note.pid, "self"});
      mesh.hosts.push_back(note.host_id);
    }
    return mesh;
  }

  std::string name(int peer) const {
    const Note& note = notes_[static_cast<size_t>(peer)];
    return name_of(peer, {note.host, note.pid, {}});
  }

  void pick_transports(Mesh& mesh, const std::string& why) {
    met_.resize(notes_.size());
    const bool forced_local = request_.transport == "local";
    for (int peer = 0; peer < request_.size; ++peer) {
      if (peer == request_.rank) continue;
      const Note& note = notes_[static_cast<size_t>(peer)];
      Met& met = met_[static_cast<size_t>(peer)];
      const bool one_process = note.process == note_.process;
      std::string& transport = mesh.members[static_cast<size_t>(peer)].transport;
      if (one_process && (forced_local || request_.transport.empty())) {
        transport = "local";
        mesh.channels[static_cast<size_t>(peer)] = local_channel(
            notes_[0].token + request_.name, request_.rank, peer, ring_bytes(request_.size));
        continue;
      }
      const bool one_host = note.host_id == note_.host_id && shm_ && !note.shm.empty();
      met.transport = one_host ? shm_.get() : note.tcp.empty() ? nullptr : tcp_.get();
      if (met.transport == nullptr)
        throw Unsupported("no transport reaches " + name(peer) +
                              (request_.transport.empty() ? "" : " by " + request_.transport) +
                              (why.empty() ? "" : ": " + why),
                          {.op = "init", .rank = request_.rank, .peer = peer});
      transport = met.transport->name();
      auto theirs = ways(peer, request_.rank);
      if (theirs.empty() || ways(request_.rank, peer).empty())
        throw Unsupported(name(peer) +
                              " and this rank are on different hosts, and the address of " +
                              (theirs.empty() ? "the former, " + note.tcp : "this, " + note_.tcp) +
                              ", cannot be reached from there; give it another with PYCOMM_ADDRESS",
                          {.op = "init", .rank = request_.rank, .peer = peer});
      if (peer < request_.rank) callers_.push_back({.peer = peer, .ways = std::move(theirs)});
    }
  }

  // The addresses by which a rank, this one or a peer of it, may call a peer, or this one.
  std::vector<std::string> ways(int listener, int caller) const {
    const Note& called = notes_[static_cast<size_t>(listener)];
    const Note& calling = notes_[static_cast<size_t>(caller)];
    const auto peer = static_cast<size_t>(listener == request_.rank ? caller : listener);
    const SocketTransport& by = *met_[peer].transport;
    return by.ways(by.name() == "shm" ? called.shm : called.tcp, called.host_id == calling.host_id);
  }

  bool complete() const {
    return std::ranges::all_of(met_, [](const Met& m) { return !m.transport || m.fd; });
  }

  void meet(Mesh& mesh) {
    while (!complete()) {
      call();
      wait();
      accept();
      advance();
      if (deadline_.expired()) throw Timeout(missing(), {.op = "init", .rank = request_.rank});
    }
    for (size_t i = 0; i < met_.size(); ++i) {
      if (!met_[i].transport) continue;
      try {
        mesh.channels[i] = met_[i].transport->accept(std::move(met_[i].fd), deadline_);
      } catch (const Error& error) {
        throw PeerLost(
            name(static_cast<int>(i)) + " was lost while the group formed: " + error.what(),
            {.op = "init", .rank = request_.rank, .peer = static_cast<int>(i)});
      }
    }
  }

  Handshake shake(Fd fd, Handshake::Role role, int expected) const {
    return {std::move(fd),
            role,
            request_.key,
            {notes_[0].token + request_.name, request_.rank, expected}};
  }

  void call() {
    for (Caller& caller : callers_) {
      const auto peer = static_cast<size_t>(caller.peer);
      if (caller.handshake || met_[peer].fd || Clock::now() < caller.retry_at) continue;
      const SocketTransport& by = *met_[peer].transport;
      try {
        caller.step = Handshake::Step::want_write;
        caller.handshake = std::make_unique<Handshake>(
            shake(by.call(caller.ways[caller.way]), Handshake::Role::connector, caller.peer));
      } catch (const PeerLost& error) {
        refused(caller, error.what());
      }
    }
  }

  void refused(Caller& caller, const std::string& why) {
    caller.handshake.reset();
    caller.why = caller.ways[caller.way] + ": " + why;
    caller.way = (caller.way + 1) % caller.ways.size();
    caller.retry_at = Clock::now() + kRetry;
    ++caller.refusals;
    if (request_.log)
      request_.log("connect to " + name(caller.peer) + " failed " +
                   std::to_string(caller.refusals) + " times with reason: " + caller.why +
                   "; retry after 0.05 seconds");
    if (caller.refusals == kRefusals)
      throw PeerLost(name(caller.peer) + " cannot be reached at " + caller.why,
                     {.op = "init", .rank = request_.rank, .peer = caller.peer});
  }

  void wait() {
    std::vector<pollfd> polled;
    for (const auto* transport : {shm_.get(), tcp_.get()}) {
      if (!transport || crowded_) continue;
      for (const int listener : transport->listeners()) polled.push_back({listener, POLLIN, 0});
    }
    crowded_ = false;
    const auto add = [&](const Handshake& handshake, Handshake::Step step) {
      const bool write = step == Handshake::Step::want_write;
      polled.push_back({handshake.fd(), static_cast<short>(write ? POLLOUT : POLLIN), 0});
    };
    for (const Caller& caller : callers_)
      if (caller.handshake) add(*caller.handshake, caller.step);
    for (const Stranger& stranger : strangers_) add(stranger.handshake, stranger.step);
    const size_t standing = polled.size();
    std::vector<int> peers;
    for (size_t i = 0; i < met_.size(); ++i) {
      if (!met_[i].fd) continue;
      polled.push_back({met_[i].fd.get(), POLLRDHUP, 0});
      peers.push_back(static_cast<int>(i));
    }
    const auto limit = std::min<std::chrono::nanoseconds>(
        std::ranges::any_of(callers_, [](const Caller& c) { return c.refusals > 0; }) ? kRetry
                                                                                      : kSlice,
        deadline_.left());
    ::poll(polled.data(), polled.size(),
           static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
    for (size_t i = standing; i < polled.size(); ++i)
      if (polled[i].revents != 0)
        throw PeerLost(name(peers[i - standing]) + " was lost while the group formed",
                       {.op = "init", .rank = request_.rank, .peer = peers[i - standing]});
  }

  void accept() {
    for (SocketTransport* transport : {shm_.get(), tcp_.get()}) {
      if (!transport) continue;
      for (const int listener : transport->listeners()) {
        while (Fd fd = accept_from(listener, &crowded_)) {
          if (strangers_.size() == kMaxStrangers) strangers_.pop_front();
          strangers_.push_back({transport, shake(std::move(fd), Handshake::Role::listener, -1)});
        }
        if (crowded_) break;
      }
      if (crowded_) break;
    }
    if (crowded_) strangers_.clear();  // no descriptors left: those that we hold may be why
  }

  void advance() {
    for (Caller& caller : callers_) {
      if (!caller.handshake) continue;
      switch (caller.step = caller.handshake->advance()) {
        case Handshake::Step::done:
          stand(caller.peer, caller.handshake->release());
          caller.handshake.reset();
          break;
        case Handshake::Step::refused:
          refused(caller, std::string(caller.handshake->why()));
          break;
        case Handshake::Step::want_read:
        case Handshake::Step::want_write:
          break;
      }
    }
    for (auto at = strangers_.begin(); at != strangers_.end();) {
      const auto step = at->step = at->handshake.advance();
      const bool over = step == Handshake::Step::done || step == Handshake::Step::refused;
      const int peer = step == Handshake::Step::done ? at->handshake.peer() : -1;
      if (peer > request_.rank && peer < request_.size &&
          met_[static_cast<size_t>(peer)].transport == at->transport)
        stand(peer, at->handshake.release());
      at = over ? strangers_.erase(at) : std::next(at);
    }
  }

  void stand(int peer, Fd fd) {
    Met& met = met_[static_cast<size_t>(peer)];
    if (met.fd) return;  // it called twice: the first call counts
    met.transport->offer(fd.get());
    met.fd = std::move(fd);
  }

  std::string missing() const {
    std::string text = "the group \"" + request_.name + "\" did not form in " +
                       std::to_string(deadline_.limit_s()) + " s: no connection with";
    for (const Caller& caller : callers_) {
      if (met_[static_cast<size_t>(caller.peer)].fd) continue;
      text += " " + name(caller.peer) + " at " + caller.ways[caller.way];
      if (!caller.why.empty()) text += " (last failure: " + caller.why + ")";
      text += ',';
    }
    for (size_t i = static_cast<size_t>(request_.rank) + 1; i < met_.size(); ++i)
      if (met_[i].transport && !met_[i].fd) text += " " + call_awaited(static_cast<int>(i)) + ",";
    text.pop_back();
    return text;
  }

  // Of a rank that was to call us: by which addresses.
  std::string call_awaited(int peer) const {
    std::string text = name(peer) + ", which did not call";
    std::string between = " ";
    for (const std::string& way : ways(request_.rank, peer)) {
      text += between + way;
      between = " or ";
    }
    return text;
  }

  const MeshRequest& request_;
  const Deadline& deadline_;
  Note note_;
  std::vector<Note> notes_;
  std::unique_ptr<SocketTransport> shm_, tcp_;
  std::vector<Met> met_;  // by rank
  std::list<Caller> callers_;
  std::list<Stranger> strangers_;
  bool crowded_ = false;
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
