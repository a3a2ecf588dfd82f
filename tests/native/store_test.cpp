// The stores: the guarantees of every store, the TCP store's bytes, and unauthenticated clients.
#include "rendezvous/store.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "harness.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_frame.h"
#include "rendezvous/store_server.h"
#include "rendezvous/tcp_store.h"
#include "stores.h"

using namespace pycomm;
using namespace pycomm::os;
using namespace pycomm::rendezvous;
using namespace pycomm::rendezvous::store_frame;
using namespace std::chrono_literals;

namespace {

const Test kValues("store: a value that is set is got, byte for byte", [] {
  with_each_store([](Store& here, Store& there) {
    for (const std::string& value :
         {std::string(), std::string("\0\n\xff", 3), std::string(kMaxValueBytes, 'x')}) {
      here.set("key", value);
      expect(there.get("key", within(10s)) == value, "there");
      there.set("key", value + "");
      expect(here.get("key", within(10s)) == value, "here");
    }
  });
});

const Test kWaits("store: get waits for set, from either end", [] {
  with_each_store([](Store& here, Store& there) {
    for (Store* getter : {&here, &there}) {
      Store* setter = getter == &here ? &there : &here;
      const std::string key = getter == &here ? "a" : "b";
      std::atomic<bool> asked{false};
      const Deadline deadline = within(10s);
      auto got = std::async(std::launch::async, [&] {
        asked = true;
        return getter->get(key, deadline);
      });
      while (!asked) std::this_thread::yield();
      // Most likely the get waits by now; the promise holds in either order.
      expect_throws<Timeout>([&] { setter->get("nothing", within(30ms)); });
      setter->set(key, "come");
      expect_equal(got.get(), "come", "what the waiting get gave");
      expect(deadline.elapsed_s() < 5, "a get must return at once after the set");
    }
  });
});

const Test kTimeout("store: a get that times out names the key, in time", [] {
  with_each_store([](Store&, Store& there) {
    const Deadline deadline = within(60ms);
    const std::string text =
        expect_throws<Timeout>([&] { there.get("rank 3's address", deadline); });
    expect_says(text, "'rank 3's address'");
    expect_says(text, "within 0.06 s");
    expect(deadline.elapsed_s() >= 0.06 && deadline.elapsed_s() < 1, "when");
    there.set("later", "still works");
    expect_equal(there.get("later", within(0s)), "still works", "after a timeout");
  });
});

const Test kThreads("store: eight threads set and get each other's values", [] {
  with_each_store([](Store& here, Store& there) {
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 8; ++rank)
      threads.emplace_back([&, rank] {
        Store& mine = rank % 2 == 0 ? here : there;
        try {
          for (int round = 0; round < 20; ++round) {
            const std::string prefix = std::to_string(round) + "/";
            mine.set(prefix + std::to_string(rank), std::to_string(rank * 1000 + round));
            for (int peer = 0; peer < 8; ++peer)
              wrong += mine.get(prefix + std::to_string(peer), within(20s)) !=
                       std::to_string(peer * 1000 + round);
          }
        } catch (const std::exception&) {
          ++wrong;
        }
      });
    for (auto& thread : threads) thread.join();
    expect_equal(wrong.load(), 0, "wrong values");
  });
});

const Test kLimits("tcp store: too large or empty values are rejected before they are sent", [] {
  const auto server = TcpStore::serve(kHost, 0, kKey);
  const auto client = TcpStore::connect(kHost, server->port(), kKey, within(10s));
  for (TcpStore* store : {server.get(), client.get()}) {
    const std::string large(kMaxValueBytes + 1, 'x');
    expect_says(expect_throws<InvalidArgument>([&] { store->set("key", large); }), "1048577");
    expect_throws<InvalidArgument>([&] { store->set("", "x"); });
    expect_throws<InvalidArgument>([&] { store->get(std::string(1025, 'k'), within(1s)); });
  }
  expect_throws<InvalidArgument>([&] { TcpStore::serve(kHost, 0, ""); });
  expect_throws<InvalidArgument>([&] { TcpStore::serve(kHost, server->port(), kKey); });
});

const Test kReuse("tcp store: consecutive calls use one connection", [] {
  const auto server = TcpStore::serve(kHost, 0, kKey);
  const auto client = TcpStore::connect(kHost, server->port(), kKey, within(10s));
  client->set("key", "value");
  const int before = open_descriptors();
  for (int i = 0; i < 50; ++i) {
    client->get("key", within(10s));
    expect_throws<Timeout>([&] { client->get("nothing", within(1ms)); });
  }
  expect_equal(open_descriptors(), before, "descriptors");
});

const Test kFull("local store: counts its bytes", [] {
  LocalStore store;
  expect(store.set_within("key", "12345", 10), "8 bytes fit in 10");
  expect(!store.set_within("other", "x", 10), "14 do not");
  expect(store.set_within("key", "1234567", 10), "the old value's space is free again");
  expect(!store.find("other").has_value(), "the rejected value is not stored");
});

const Test kOrder("tcp store: a client may start before its server", [] {
  const uint16_t port = free_port();
  std::unique_ptr<TcpStore> server;
  std::vector<std::string> lines;
  const auto client =
      TcpStore::connect(kHost, port, kKey, within(10s), {.log = [&](const std::string& line) {
                          lines.push_back(line);
                          if (lines.size() == 2) server = TcpStore::serve(kHost, port, kKey);
                        }});
  const std::string start = "connect addr=127.0.0.1:" + std::to_string(port);
  expect_equal(lines.size(), size_t{2}, "attempts that failed");
  expect_equal(lines[0],
               start + " failed 1 times with reason: Connection refused retry after 0.05 seconds",
               "the first line");
  expect_equal(lines[1],
               start + " failed 2 times with reason: Connection refused retry after 0.1 seconds",
               "the second line");
  client->set("key", "value");
  expect_equal(server->get("key", within(1s)), "value", "through the late server");
});

const Test kNoRank("tcp store: without a server the wait ends in time with the reason", [] {
  const Deadline deadline = within(200ms);
  const std::string text =
      expect_throws<Timeout>([&] { TcpStore::connect(kHost, free_port(), kKey, deadline); });
  expect_says(text, "Connection refused");
  expect_says(text, "within 0.2 s");
  expect(deadline.elapsed_s() < 1, "when");
});

const Test kWrongKey("tcp store: a wrong key is refused with the reason", [] {
  const auto server = TcpStore::serve(kHost, 0, kKey);
  const std::string text = expect_throws<Timeout>(
      [&] { TcpStore::connect(kHost, server->port(), "a guess", within(200ms)); });
  expect_says(text, "does not hold the same key");
});

const Test kGone("tcp store: nothing is left of a server that is destroyed", [] {
  const int before = open_descriptors();
  auto server = TcpStore::serve(kHost, 0, kKey);
  const uint16_t port = server->port();
  {
    const auto client = TcpStore::connect(kHost, port, kKey, within(10s));
    auto text = std::async(std::launch::async, [&] {
      return expect_throws<PeerLost>([&] { client->get("never", within(20s)); });
    });
    // A second client passes its handshake only when the server's thread runs.
    TcpStore::connect(kHost, port, kKey, within(10s))->set("key", "value");
    server.reset();
    expect_says(text.get(), "lost the store");
    // The server does not return: a call that would connect does not try for its 30 s.
    expect_says(expect_throws<PeerLost>([&] { client->remove("key"); }), "lost the store");
  }
  expect_throws<Timeout>([&] { TcpStore::connect(kHost, port, kKey, within(10ms)); });
  expect_equal(open_descriptors(), before, "descriptors");
  // The port is free at once, again and again.
  for (int i = 0; i < 20; ++i) {
    server = TcpStore::serve(kHost, port, kKey);
    TcpStore::connect(kHost, port, kKey, within(10s))->set("key", "value");
    server.reset();
  }
  expect_equal(open_descriptors(), before, "descriptors after 20 servers");
});

const Test kFrames("tcp store: any bytes parse to a frame or to a clean refusal", [] {
  const std::string set = encode({Verb::set, 7, "key", "value"});
  const std::string reply = encode({Status::ok, "value"});
  const auto parsed = parse_request(set);
  expect(parsed.parse == Parse::complete && parsed.frame.key == "key" &&
             parsed.frame.value == "value" && parsed.frame.wait_ms == 7,
         "a request survives a round trip");
  expect_equal(parse_reply(reply).frame.value, "value", "a reply survives a round trip");
  for (size_t cut = 0; cut < set.size(); ++cut)
    expect(parse_request(set.substr(0, cut)).parse == Parse::more, "a truncated request");
  for (size_t cut = 0; cut < reply.size(); ++cut)
    expect(parse_reply(reply.substr(0, cut)).parse == Parse::more, "a truncated reply");
  expect(parse_request(set + "x").parse == Parse::broken, "a byte too many");
  for (const char bad : {0, 7}) {
    std::string other = set;
    other[0] = bad;
    expect(parse_request(other).parse == Parse::broken, "an unknown verb");
    other = reply;
    other[0] = bad;
    expect(parse_reply(other).parse == Parse::broken, "an unknown status");
  }
  for (const char verb : {2, 4}) {
    std::string get = set;
    get[0] = verb;
    expect(parse_request(get).parse == Parse::broken, "a get or remove with a value");
  }

  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = set;
    const size_t changes = 1 + random() % 4;
    for (size_t j = 0; j < changes; ++j)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    bytes.resize(random() % (bytes.size() + 1));
    const auto request = parse_request(bytes);
    expect(request.needed <= kRequestHeadBytes + 1024 + (1 << 20),
           "the largest buffer for a request");
    expect(parse_reply(bytes).needed <= 5 + (1 << 20), "and a reply");
  }
});

// Performs the handshake of a client of the store.
Fd friendly_socket(uint16_t port) {
  transport::Handshake shake(start_connect(tcp_address(kHost, port)),
                             transport::Handshake::Role::connector, kKey,
                             {std::string(kContext), kClientRank, kServerRank});
  while (shake.advance() == transport::Handshake::Step::want_write)
    poll_one(shake.fd(), POLLOUT, 5s);
  while (shake.advance() == transport::Handshake::Step::want_read) poll_one(shake.fd(), POLLIN, 5s);
  return shake.release();
}

const Test kAbsent("tcp store: the server answers when the wait is over, not before", [] {
  const auto server = TcpStore::serve(kHost, 0, kKey);
  const Fd fd = friendly_socket(server->port());
  const std::string ask = encode({Verb::get, 100, "never", ""});
  const Deadline deadline = within(10s);
  ::send(fd.get(), ask.data(), ask.size(), MSG_NOSIGNAL);
  expect(poll_one(fd.get(), POLLIN, deadline.left()) != 0, "no answer");
  expect(deadline.elapsed_s() > 0.09 && deadline.elapsed_s() < 5, "when");
  std::string answer(5, '\0');
  expect_equal(::recv(fd.get(), answer.data(), answer.size(), 0), 5, "bytes of the answer");
  expect(parse_reply(answer).frame.status == Status::absent, "absent");
});

const Test kNonsense("tcp store: invalid bytes end only the connection of their client", [] {
  const auto server = TcpStore::serve(kHost, 0, kKey);
  const auto client = TcpStore::connect(kHost, server->port(), kKey, within(10s));
  std::mt19937 random(2);
  for (int i = 0; i < 50; ++i) {
    const Fd fd = friendly_socket(server->port());
    std::string bytes(1 + random() % 100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    bytes[0] = '\x7f';  // no verb
    bytes.resize(std::max<size_t>(bytes.size(), kRequestHeadBytes));
    ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    expect(poll_one(fd.get(), POLLIN, 5s) != 0,
           "the server keeps a client that sends invalid bytes");
  }
  client->set("key", "value");
  expect_equal(server->get("key", within(1s)), "value", "another client");
});

// Another process with its own descriptors: `body` returns the exit status.
class Child {
 public:
  explicit Child(const std::function<int(uint16_t)>& body) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("making a pipe");
    write_end_ = ends[1];  // neither is an Fd: those are closed in a forked child
    pid_ = ::fork();
    if (pid_ != 0) {
      ::close(ends[0]);
      return;
    }
    ::close(ends[1]);
    ::alarm(60);
    uint16_t port = 0;
    if (::read(ends[0], &port, sizeof port) != sizeof port) ::_exit(98);
    int status = 99;
    try {
      status = body(port);
    } catch (const std::exception& error) {
      ::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(status);
  }
  ~Child() { ::close(write_end_); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void start(uint16_t port) {
    if (::write(write_end_, &port, sizeof port) != sizeof port) throw_errno("writing");
  }
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  int write_end_ = -1;
  pid_t pid_ = -1;
};

// One of 2,000: random bytes, silence, half a close, a greeting only, or an immediate close. The
// last 500 stay open.
void be_hostile(uint16_t port, int number, std::vector<Fd>& kept) {
  Fd fd;
  try {
    fd = start_connect(tcp_address(kHost, port));
  } catch (const Error&) {
    return;
  }
  poll_one(fd.get(), POLLOUT, 5s);
  const std::string garbage(number % 5 == 3 ? 36 : 300, 'G');
  if (number % 5 == 0 || number % 5 == 3)
    ::send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
  if (number % 5 == 2) ::shutdown(fd.get(), SHUT_WR);
  if (number % 5 == 4) return;
  kept.push_back(std::move(fd));
  if (kept.size() > 500) kept.erase(kept.begin());
}

// A server with few descriptors, and a process with unauthenticated clients and one client that
// holds the key.
void survive_unauthenticated_clients(int descriptors) {
  Child child([](uint16_t port) {
    std::vector<Fd> kept;
    for (int i = 0; i < 1000; ++i) be_hostile(port, i, kept);
    const Deadline deadline = within(20s);
    const auto client = TcpStore::connect(kHost, port, kKey, deadline);
    for (int i = 1000; i < 2000; ++i) be_hostile(port, i, kept);
    client->set("from the client", "came through");
    const auto late = TcpStore::connect(kHost, port, kKey, deadline);
    return late->get("from the server", deadline) == "hello" ? 0 : 1;
  });
  const int before = open_descriptors();
  {
    const auto server = TcpStore::serve(kHost, 0, kKey);
    const int serving = open_descriptors();
    const FewDescriptors few(descriptors);
    child.start(server->port());
    server->set("from the server", "hello");
    expect_equal(server->get("from the client", within(30s)), "came through", "the client's value");
    expect_equal(child.wait(), 0, "the client");
    // The clients ended with their process: the server closes each connection.
    const Deadline deadline = within(10s);
    while (open_descriptors() > serving && !deadline.expired())
      expect_throws<Timeout>([&] { server->get("pause", within(10ms)); });
    expect_equal(open_descriptors(), serving, "descriptors after the clients have ended");
  }
  expect_equal(open_descriptors(), before, "descriptors after the server has ended");
}

const Test kFlood("tcp store: a client connects beside 2,000 unauthenticated clients",
                  [] { survive_unauthenticated_clients(200); });

const Test kExhausted("tcp store: the same when they take every descriptor",
                      [] { survive_unauthenticated_clients(12); });

const Test kSilent("tcp store: a silent client is disconnected at the limit, and not before", [] {
  StoreServer server(tcp_address(kHost, 0), kKey, 100ms);
  const Fd client = start_connect(tcp_address(kHost, server.port()));
  const Deadline deadline = within(10s);
  expect(poll_one(client.get(), POLLIN, deadline.left()) != 0, "it stays connected");
  expect(deadline.elapsed_s() > 0.09 && deadline.elapsed_s() < 5, "when");
});

const Test kFew("tcp store: no more pending connections than the descriptors allow are held", [] {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit few{256, limit.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);  // of which a quarter is 64
  const auto server = TcpStore::serve(kHost, 0, kKey);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  const int serving = open_descriptors();
  std::vector<Fd> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(start_connect(tcp_address(kHost, server->port())));
    poll_one(clients.back().get(), POLLOUT, 5s);
  }
  // The last in the queue: once it is accepted, so are all the others.
  const auto client = TcpStore::connect(kHost, server->port(), kKey, within(10s));
  const int inside = open_descriptors() - serving - 100 - 2;
  expect(inside <= 64, std::to_string(inside) + " clients are connected");
  client->set("key", "value");
});

const Test kAcceptExhausted("socket: accept says when no descriptor is left", [] {
  const Fd door = listen_on(tcp_address(kHost, 0), 8);
  const Fd caller = start_connect(local_address(door.get()));
  expect(poll_one(door.get(), POLLIN, 5s) != 0, "the client connected");
  bool exhausted = false;
  {
    const FewDescriptors none(0);
    expect(!accept_from(door.get(), &exhausted), "no descriptor, no connection");
  }
  expect(exhausted, "it must say so");
  expect(static_cast<bool>(accept_from(door.get(), &exhausted)), "the client still waits");
  expect(!exhausted, "no longer");
});

}  // namespace
