// A distant rank connects during a flood of hostile connections: to the listener of a group and to
// the store. The round trip is emulated: the rank sends its proof that much after the answer.
// Also a rank that has no descriptor left.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/connector.h"
#include "descriptors.h"
#include "harness.h"
#include "os/shared_memory.h"
#include "os/socket.h"
#include "ranks.h"
#include "rendezvous/store_frame.h"
#include "rendezvous/tcp_store.h"
#include "transport/admission.h"
#include "transport/shm.h"

namespace {

using namespace pycomm;
using namespace pycomm::os;
using namespace pycomm::transport;
using namespace std::chrono_literals;

constexpr size_t kHeldOpen = 300;

// Connects to an address at a given rate, from one address of this host or from many, and sends a
// whole greeting on every second connection.
class Flood {
 public:
  Flood(const Address& to, double per_s, bool many)
      : to_(to), per_s_(per_s), many_(many), thread_([this] { run(); }) {}
  ~Flood() {
    ending_ = true;
    thread_.join();
  }
  Flood(const Flood&) = delete;
  Flood& operator=(const Flood&) = delete;
  size_t called() const { return called_; }

 private:
  void run() {
    const auto begin = Clock::now();
    while (!ending_) {
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      // A backlog is not sent as one burst.
      const auto due = static_cast<size_t>(std::min(seconds * per_s_, called_ + 50.0));
      while (called_ < due && !ending_) call();
      ::poll(nullptr, 0, 1);
    }
  }

  void call() {
    ++called_;
    const auto word = [&] { return std::to_string(1 + random_() % 250); };
    try {
      const std::string host = many_ ? "127." + word() + "." + word() + "." + word() : "127.0.0.1";
      const Address from = tcp_address(host, 0);
      open_.push_back(start_connect(to_, &from));
    } catch (const PeerLost&) {  // no port left for the moment
      return;
    }
    poll_one(open_.back().get(), POLLOUT, 1ms);
    const std::string greeting(36, 'g');
    if (called_ % 2 == 0)
      (void)!::send(open_.back().get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
    if (open_.size() > kHeldOpen) open_.pop_front();
  }

  Address to_;
  double per_s_;
  bool many_;
  std::minstd_rand random_{7};
  std::deque<Fd> open_;
  std::atomic<size_t> called_{0};
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

struct Far {
  std::chrono::milliseconds round_trip;
  double per_s;
};
constexpr Far kFar[] = {{10ms, 8000}, {50ms, 1500}, {100ms, 800}};

// One attempt of a rank at this distance.
bool attempt(const Address& to, const std::string& key, const HandshakeParams& params,
             const Far& far) {
  Handshake shake(start_connect(to), Handshake::Role::connector, key, params);
  bool answered = false;
  while (true) {
    const auto step = shake.advance();
    if (step == Handshake::Step::done) return true;
    if (step == Handshake::Step::refused) return false;
    const bool reads = step == Handshake::Step::want_read;
    if (poll_one(shake.fd(), reads ? POLLIN : POLLOUT, 100ms) == 0 || !reads || answered) continue;
    answered = true;
    ::poll(nullptr, 0, static_cast<int>(far.round_trip.count()));
  }
}

// `params_of`: its parameters at the n-th attempt.
void expect_in(const Address& to, const std::string& key,
               const std::function<HandshakeParams(int)>& params_of) {
  int time = 0;
  for (const bool many : {false, true}) {
    for (const Far& far : kFar) {
      const HandshakeParams params = params_of(time++);
      const Flood flood(to, far.per_s, many);
      while (flood.called() < 1000) ::poll(nullptr, 0, 1);  // the flood runs at its full rate
      const Deadline deadline(10s * ranks::kSlowdown);
      for (int tries = 1; !attempt(to, key, params, far); ++tries) {
        expect(!deadline.expired(), std::to_string(far.round_trip.count()) + " ms away, " +
                                        (many ? "many addresses: " : "one address: ") +
                                        std::to_string(tries) + " attempts failed");
        ::poll(nullptr, 0, 50);  // as a rank's pause before it connects again
      }
    }
  }
}

const Test kListener("a distant rank connects during a flood of a group's listener", [] {
  bootstrap::Connector::Options request;
  request.rank = 1;
  request.key = "key";
  request.context = "test";
  request.transports.push_back(make_tcp("127.0.0.1", ""));
  SocketTransport* by = request.transports[0].get();
  const Address to = local_address(by->listeners()[0]);
  for (int i = 0; i < 9; ++i) request.addresses.push_back({i == 1 ? nullptr : by, {""}, "rank"});
  std::atomic<bool> ending{false};
  bootstrap::Connector host(std::move(request));
  std::thread thread([&] {
    std::vector<pollfd> also;
    while (!ending) (void)host.poll(10ms, also);
  });
  std::string failure;
  try {
    expect_in(to, "key", [](int time) {  // a rank is expected once
      return HandshakeParams{.context = "test", .rank = 2 + time, .expected = 1};
    });
  } catch (const std::exception& error) {
    failure = error.what();
  }
  ending = true;
  thread.join();
  expect(failure.empty(), failure);
});

const Test kStore("a distant rank connects during a flood of the store", [] {
  const std::string key(32, 'k');
  const auto server = rendezvous::TcpStore::serve("127.0.0.1", 0, key);
  expect_in(tcp_address("127.0.0.1", server->port()), key, [](int) {
    return HandshakeParams{std::string(rendezvous::store_frame::kContext),
                           rendezvous::store_frame::kClientRank,
                           rendezvous::store_frame::kServerRank};
  });
});

const Test kChoice("eviction: from the largest source, without a greeting, then at random", [] {
  std::minstd_rand random(1);
  std::vector<Pending> pending(64);
  for (size_t i = 0; i < 64; ++i) pending[i] = {i, i % 2 == 0};
  std::vector<bool> chosen(64);
  for (int i = 0; i < 4000; ++i) chosen[choose_evicted(pending, random)] = true;
  for (size_t i = 0; i < 64; ++i)
    expect_equal(static_cast<bool>(chosen[i]), i % 2 == 1, "place " + std::to_string(i));
  for (size_t i = 0; i < 20; ++i) pending[i] = {99, true};
  for (int i = 0; i < 1000; ++i)
    expect(choose_evicted(pending, random) < 20, "a source above its share is evicted");
  expect(max_pending() >= 64 && max_pending() <= 1024, "how many are held");
});

const Test kLimit("a connector holds no more pending connections than the descriptors allow", [] {
  bootstrap::Connector::Options request;
  request.key = "key";
  request.context = "test";
  request.transports.push_back(make_tcp("127.0.0.1", ""));
  request.addresses.resize(2);
  const std::string address = request.transports[0]->address();
  std::optional<bootstrap::Connector> connector;
  {
    const FewDescriptors few(200);  // of which a quarter is less than 64, the minimum
    connector.emplace(std::move(request));
  }
  const int before = open_descriptors();
  std::vector<Fd> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(start_connect(parse_tcp_address(address)));
    poll_one(clients.back().get(), POLLOUT, 5s);
  }
  std::vector<pollfd> none;
  for (int round = 0; round < 10; ++round) {
    (void)connector->poll(10ms, none);
    const int held = open_descriptors() - before - 100;
    expect(held > 0 && held <= 64, std::to_string(held) + " connections are pending");
  }
});

#if !defined(__SANITIZE_ADDRESS__)  // UBSan opens a pipe to check the type of an error
const Test kFewDescriptors(
    "shm: a rank that cannot receive descriptors names the limit of open files", [] {
      std::string why;
      const auto caller = make_shm(page_bytes(), page_bytes(), why);
      const auto listener = make_shm(page_bytes(), page_bytes(), why);
      expect(caller && listener, why);
      ranks::Sockets sockets = ranks::connect_sockets(*caller, *listener);
      caller->send_memory(sockets.out.get());
      listener->send_memory(sockets.in.get());
      const FewDescriptors one(1);
      const ranks::Ending ending =
          ranks::ending_of([&] { (void)caller->accept(std::move(sockets.out), Deadline(10s)); });
      expect(ending.says("ulimit -n"), ending.text());
    });
#endif

// As an evicted rank sees it: its connection is accepted, then closed.
const Test kCut("a connection closed before the answer is retried, and does not count", [] {
  const Fd door = listen_on(tcp_address("127.0.0.1", 0));
  bootstrap::Connector::Options request;
  request.rank = 1;
  request.key = "key";
  request.context = "test";
  request.max_failures = 3;
  request.transports.push_back(make_tcp("127.0.0.1", ""));
  request.addresses = {{request.transports[0].get(), {local_address(door.get()).text()}, "rank 0"},
                       {}};
  bootstrap::Connector guest(std::move(request));
  guest.dial(0);
  const Deadline deadline(20s);
  for (int cut = 0; cut < 8;) {
    std::vector<pollfd> also{{door.get(), POLLIN, 0}};
    for (const engine::ConnectResult& arrival : guest.poll(10ms, also))
      expect(false, "lost after " + std::to_string(cut) + " calls: " + arrival.why);
    if (accept_from(door.get())) ++cut;
    expect(!deadline.expired(), "it does not connect again");
  }
});

}  // namespace
