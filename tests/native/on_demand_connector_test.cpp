// Ranks that connect on demand: two that connect to each other at once, unauthenticated clients at
// the listener. Calls of such groups are in group_demand_test.cpp and engine_demand_test.cpp.
#include "bootstrap/on_demand_connector.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "bootstrap/connector.h"
#include "collectives/choose.h"
#include "engine/engine.h"
#include "harness.h"
#include "os/shared_memory.h"
#include "ranks.h"
#include "rendezvous/tcp_store.h"

namespace {

using namespace pycomm;
using namespace pycomm::bootstrap;
using namespace pycomm::transport;
using namespace std::chrono_literals;
using ranks::Array;

constexpr size_t kRing = size_t{64} << 10;

std::vector<std::string> by_socket() { return {"shm", "tcp"}; }

struct BySocket {
  BySocket(const std::string& name, void (*body)(const std::string& transport)) {
    for (const std::string& transport : by_socket())
      Test(transport + ": " + name, [=] { body(transport); });
  }
};

// `size` ranks that connect by one transport; ranks with another key are not authenticated.
std::vector<Connector::Options> requests(int size, const std::string& transport) {
  std::vector<Connector::Options> all(static_cast<size_t>(size));
  std::string why;
  for (auto& request : all)
    request.transports.push_back(transport == "shm" ? make_shm(kRing, os::page_bytes(), why)
                                                    : make_tcp("127.0.0.1", ""));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].rank = static_cast<int>(i);
    all[i].key = "key";
    all[i].context = "test";
    for (size_t j = 0; j < all.size(); ++j)
      all[i].addresses.push_back({j == i ? nullptr : all[i].transports[0].get(),
                                  {all[j].transports[0]->address()},
                                  "rank " + std::to_string(j)});
  }
  return all;
}

// Each end receives the data of the other, in both directions.
void expect_joined(Channel& a, Channel& b, const std::string& what) {
  const Deadline deadline(10s);
  for (Channel* from : {&a, &b}) {
    Channel& to = from == &a ? b : a;
    const std::string sent = from == &a ? "from a" : "from b";
    expect_equal(from->send({}, std::as_bytes(std::span(sent))), sent.size(), what);
    std::string got(sent.size(), '\0');
    for (size_t have = 0; have < got.size() && !deadline.expired();)
      have += to.receive(std::as_writable_bytes(std::span(got)).subspan(have));
    expect_equal(got, sent, what);
  }
}

const BySocket kAtOnce(
    "two ranks that connect to each other at any time hold one connection",
    [](const std::string& by) {
      int both = 0;
      for (uint32_t seed = 0; seed < 300 / (ranks::kSlowdown > 1 ? 3 : 1); ++seed) {
        std::mt19937 random(seed);
        const std::string what = "seed " + std::to_string(seed);
        auto all = requests(2, by);
        std::vector<std::unique_ptr<Connector>> connectors;
        for (auto& request : all)
          connectors.push_back(std::make_unique<Connector>(std::move(request)));
        // Each connects before one of its first rounds; sometimes one of them never does.
        int calls_in[2] = {static_cast<int>(random() % 8), static_cast<int>(random() % 8)};
        const size_t silent = random() % 4;
        both += silent > 1;
        std::unique_ptr<Channel> met[2];
        const Deadline deadline(20s);
        while (!met[0] || !met[1]) {
          expect(!deadline.expired(), what + ": they do not meet");
          const size_t turn = random() % 2;
          if (turn != silent && calls_in[turn]-- == 0)
            connectors[turn]->dial(1 - static_cast<int>(turn));
          std::vector<pollfd> also;
          for (engine::ConnectResult& arrival : connectors[turn]->poll(random() % 2 * 1ms, also)) {
            expect(arrival.channel && !met[turn], what + ": " + arrival.why);
            met[turn] = std::move(arrival.channel);
          }
        }
        expect_joined(*met[0], *met[1], what);
        for (int i = 0; i < 20; ++i) {  // no second connection follows
          std::vector<pollfd> also;
          expect(connectors[random() % 2]->poll(0ns, also).empty(), what + ": they meet again");
        }
      }
      expect(both > 10, "sometimes both connected");
    });

const BySocket kThreads("all connectors find each other", [](const std::string& by) {
  constexpr int kSize = 5;
  for (int repeat = 0; repeat < 10; ++repeat) {
    auto all = requests(kSize, by);
    std::vector<std::unique_ptr<OnDemandConnector>> connectors;
    for (auto& request : all)
      connectors.push_back(std::make_unique<OnDemandConnector>(std::move(request), kRing));
    std::vector<std::vector<std::unique_ptr<Channel>>> met(kSize);
    ranks::run(kSize, [&](int rank) {
      const auto me = static_cast<size_t>(rank);
      met[me].resize(kSize);
      for (int peer = 0; peer < kSize; ++peer)
        if (peer != rank) connectors[me]->request(peer);
      for (int missing = kSize - 1; missing > 0;) {
        expect(os::poll_one(connectors[me]->descriptor(), POLLIN, 20s) != 0, "a peer is missing");
        for (engine::ConnectResult& arrival : connectors[me]->take()) {
          auto& place = met[me][static_cast<size_t>(arrival.peer)];
          expect(arrival.channel && !place, "met twice, or lost: " + arrival.why);
          place = std::move(arrival.channel);
          --missing;
        }
      }
    });
    for (size_t i = 0; i < kSize; ++i)
      for (size_t j = i + 1; j < kSize; ++j) expect_joined(*met[i][j], *met[j][i], "a pair");
    for (auto& connector : connectors) connector->close();
    for (auto& connector : connectors) expect(connector->take().empty(), "no peer is met twice");
  }
});

engine::ConnectResult wait_for_one(OnDemandConnector& connector) {
  expect(os::poll_one(connector.descriptor(), POLLIN, 20s) != 0, "nothing arrives");
  auto arrivals = connector.take();
  expect_equal(arrivals.size(), size_t{1}, "arrivals");
  return std::move(arrivals[0]);
}

const BySocket kNoRank("a rank that left is reported within two seconds",
                       [](const std::string& by) {
                         auto all = requests(2, by);
                         all.pop_back();  // its listener closes
                         OnDemandConnector connector(std::move(all[0]), kRing);
                         const auto begin = Clock::now();
                         connector.request(1);
                         const engine::ConnectResult arrival = wait_for_one(connector);
                         expect(!arrival.channel && !arrival.why.empty(), "it was not lost");
                         expect(Clock::now() - begin < 2s * ranks::kSlowdown, "it took long");
                       });

const BySocket kStrangers(
    "unauthenticated clients are refused, and do not keep any rank out", [](const std::string& by) {
      auto all = requests(3, by);
      const auto address = all[1].transports[0]->address();
      const auto caller = by == "shm" ? nullptr : make_tcp("127.0.0.1", "");
      const SocketTransport& way = *all[0].transports[0];
      std::vector<os::Fd> crowd;
      const auto more = [&] {
        for (int i = 0; i < 100; ++i) {
          crowd.push_back(way.start_connect(address));
          if (i % 2 == 0)
            (void)!::send(crowd.back().get(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
        }
      };
      more();
      all[2].key = "another";
      Connector thief(std::move(all[2]));
      thief.dial(1);
      OnDemandConnector host(std::move(all[1]), kRing);
      std::vector<pollfd> also;
      for (int i = 0; i < 20; ++i)
        expect(thief.poll(10ms, also).empty(), "a rank with another key was accepted");
      expect(host.take().empty(), "an unauthenticated client was accepted");
      more();
      OnDemandConnector guest(std::move(all[0]), kRing);
      guest.request(1);
      const engine::ConnectResult a = wait_for_one(guest), b = wait_for_one(host);
      expect(a.channel && b.channel && a.peer == 1 && b.peer == 0, a.why + b.why);
      expect_joined(*a.channel, *b.channel, "behind unauthenticated clients");
    });
}  // namespace
