#include "device/detached_calls.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "core/errors.h"
#include "os/thread.h"

namespace pycomm::device {

struct DetachedCalls::State {
  std::mutex mutex;  // guards `running`
  std::condition_variable returned;
  int running = 0;

  void run(std::shared_ptr<Device> device, std::function<void()> body) noexcept {
    try {
      device->while_current(body);
    } catch (const Error&) {  // no driver any more, at the end of the process
    }
    // Before wait() returns: later a thread must not destroy what may hold Python objects.
    body = {};
    device.reset();
    const std::lock_guard lock(mutex);
    --running;
    returned.notify_all();
  }
};

DetachedCalls::DetachedCalls(std::shared_ptr<Device> device)
    : device_(std::move(device)), state_(std::make_shared<State>()) {}

void DetachedCalls::start(std::function<void()> body) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->running;
  }
  const auto shared = std::make_shared<std::function<void()>>(std::move(body));
  try {
    os::start_thread("pycomm-detached", [state = state_, device = device_, shared]() mutable {
      state->run(std::move(device), std::move(*shared));
    }).detach();
  } catch (const Unsupported&) {  // no thread: the body has to run, as others wait for its effect
    state_->run(device_, std::move(*shared));
  }
}

bool DetachedCalls::wait(const Deadline& deadline) noexcept {
  std::unique_lock lock(state_->mutex);
  return state_->returned.wait_for(lock, deadline.left(), [this] { return state_->running == 0; });
}

}  // namespace pycomm::device
