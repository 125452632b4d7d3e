#include "device.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"
#include "forks.hpp"

namespace zs {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLook = std::chrono::microseconds(100);  // a chunk of 16 MiB takes three times as long
constexpr auto kDoubt =
    std::chrono::milliseconds(100);  // without a landing, the driver is asked whether all is well
// Parts in flight that a guard could still have moved aside: some milliseconds of work, so that the stream
// never runs dry.
constexpr size_t kInFlight = 16;
// Parts by one call and with one mark, one call a look: training launches just then, and must get its turn
// with the driver. Only at a mark does a copy of training's own, of a loss that it reads, get in between: so
// where training does not wait for the drain, each part has its own. Where it does, fewer are quicker.
constexpr size_t kAtATime = 4;
// The driver's queue holds about a thousand calls. One more waits, with the driver's lock, until something in
// it is through, and all who launch wait behind it.
constexpr size_t kMostCalls = 768;

// ZEROSTALL_WITHOUT="order,guard": tests take one safeguard away and must then see wrong bytes.
bool without(const char* safeguard) {
  const char* setting = std::getenv("ZEROSTALL_WITHOUT");
  return setting != nullptr && std::string(setting).find(safeguard) != std::string::npos;
}

}  // namespace

std::shared_ptr<Device> Device::open(int ordinal) {
  std::shared_ptr<Device> device(new Device(ordinal));
  // Signals are for the interpreter's main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // The thread holds the device: the last job to let go of it may do so on that very thread.
  device->thread_ = new std::thread([device] { device->serve(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(device->thread_->native_handle(), "zs cuda copy");
  const sched_param plain{};  // a batch thread that wakes up does not push training off its core
  pthread_setschedparam(device->thread_->native_handle(), SCHED_BATCH, &plain);
  return device;
}

Device::Device(int ordinal)
    : context_(std::make_shared<cuda::Context>(ordinal)),
      vram_(std::make_shared<Vram>(context_)),
      ordered_(!without("order")),
      guarded_(!without("guard")),
      owner_(forks()) {
  const cuda::Context::Current current(*context_);
  try {
    int least = 0, greatest = 0;
    ZS_CUDA(cuCtxGetStreamPriorityRange, &least, &greatest);
    ZS_CUDA(cuStreamCreateWithPriority, &copies_, CU_STREAM_NON_BLOCKING, least);
    ZS_CUDA(cuStreamCreateWithPriority, &at_once_, CU_STREAM_NON_BLOCKING, greatest);
    for (CUevent* event : {&begun_, &joined_, &safe_, &frozen_})
      ZS_CUDA(cuEventCreate, event, CU_EVENT_DISABLE_TIMING);
    for (Times& times : times_)
      for (CUevent* event : {&times.saved, &times.guarded, &times.moved, &times.passed})
        ZS_CUDA(cuEventCreate, event, CU_EVENT_DEFAULT);
    void* counter = nullptr;
    ZS_CUDA(cuMemHostAlloc, &counter, sizeof(uint64_t), CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE);
    counter_ = static_cast<uint64_t*>(counter);
    *counter_ = 0;
    ZS_CUDA(cuMemHostGetDevicePointer, &counter_at_, counter, 0);
  } catch (...) {
    destroy();
    throw;
  }
}

Device::~Device() {
  if (forks() != owner_) return;  // a forked child has no driver
  try {
    const cuda::Context::Current current(*context_);
    destroy();
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

void Device::destroy() noexcept {
  const cuda::Driver& d = cuda::driver();
  for (const Times& times : times_)
    idle_events_.insert(idle_events_.end(), {times.saved, times.guarded, times.moved, times.passed});
  idle_events_.insert(idle_events_.end(), {begun_, joined_, safe_, frozen_});
  for (CUevent event : idle_events_)
    if (event != nullptr) d.cuEventDestroy(event);
  if (copies_ != nullptr) d.cuStreamDestroy(copies_);
  if (at_once_ != nullptr) d.cuStreamDestroy(at_once_);
  if (counter_ != nullptr) d.cuMemFreeHost(counter_);
}

void Device::close() noexcept {
  struct Dropped {
    std::shared_ptr<Lane> lane;
    std::shared_ptr<void> keep;
    uint64_t parts;
  };
  std::vector<Dropped> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    stop_ = true;
    for (const std::shared_ptr<Lane>& lane : lanes_) dropped.push_back({lane, lane->keep, give_up(*lane)});
  }
  wake_.notify_all();
  const auto why =
      std::make_exception_ptr(Error(Kind::usage, "the device was closed before the job had ended"));
  for (const Dropped& one : dropped)
    if (one.parts != 0) one.lane->landing->dropped(one.parts, why);
  thread_->join();
  delete thread_;
}

void Device::refuse_capturing(CUstream stream) const {
  const cuda::Context::Current current(*context_);
  refuse_captured(stream);
}

void Device::refuse_captured(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  ZS_CUDA(cuStreamIsCapturing, stream, &status);
  if (status != CU_STREAM_CAPTURE_STATUS_NONE)
    throw Error(Kind::capability,
                "the stream is being captured into a CUDA graph: save and the guard belong outside; with "
                "guard='manual', wrap the graph's replay in `with ckpt.guard():`");
}

void Device::order(CUstream first, CUstream then, CUevent event) const {
  ZS_CUDA(cuEventRecord, event, first);
  ZS_CUDA(cuStreamWaitEvent, then, event, CU_EVENT_WAIT_DEFAULT);
}

// As work of `training`, whichever stream does it. With mutex_ held.
void Device::copy_within_order(CUstream training, cuda::Way way, std::span<const cuda::Copy> copies,
                               bool batch) {
  constexpr size_t kWorthIt = 4;
  if (copies.size() < kWorthIt || !batch || !cuda::has_batches()) {
    cuda::copy(way, copies, training, false);
    return;
  }
  // A batch cannot go to the legacy default stream, which is training's mostly.
  order(training, at_once_, begun_);
  cuda::copy(way, copies, at_once_, true);
  order(at_once_, training, joined_);
}

void Device::begin(const std::shared_ptr<Lane>& lane, CUstream training, std::span<const cuda::Copy> at_once,
                   cuda::Way at_once_way, std::shared_ptr<void> keep) {
  const cuda::Context::Current current(*context_);
  refuse_captured(training);
  std::unique_lock lock(mutex_);
  if (stop_) throw Error(Kind::usage, "the device is closed");
  copy_within_order(training, at_once_way, at_once, at_once_way == cuda::Way::within || lane->pinned);
  mark_order(*lane, training);
  lane->keep = std::move(keep);
  lane->begun = moved_ = Clock::now();
  lanes_.push_back(lane);
  lock.unlock();  // whom that wakes would have to wait, and be woken once more
  wake_.notify_one();
}

// The copy stream sees memory as all work given to `training` so far will leave it: what is recorded here it
// waits for later. With mutex_ held.
void Device::mark_order(Lane& lane, CUstream training) {
  lane.forecast = lane.ahead == kForecast;
  if (lane.forecast) {
    now_ = 1 - now_;
    times_[now_].all = false;
    lane.times = now_;
    lane.ordered = times_[now_].saved;
  } else if (!idle_events_.empty()) {
    lane.ordered = idle_events_.back();
    idle_events_.pop_back();
  } else {
    ZS_CUDA(cuEventCreate, &lane.ordered, CU_EVENT_DISABLE_TIMING);
  }
  lane.pooled = !lane.forecast;
  ZS_CUDA(cuEventRecord, lane.ordered, training);
}

// What begin() left to be done before anything of a lane is queued. With mutex_ held.
void Device::prepare(Lane& lane) {
  if (lane.ordered != nullptr) {
    const CUevent event = std::exchange(lane.ordered, nullptr);
    if (lane.pooled)
      idle_events_.push_back(event);  // whoever waits for it has been told of the record of now
    if (ordered_) ZS_CUDA(cuStreamWaitEvent, copies_, event, CU_EVENT_WAIT_DEFAULT);
    // What looks at the sources has an order of its own: it is to find out where that of the copies is wrong.
    if (lane.sampling.every != 0 && probes_)
      ZS_CUDA(cuStreamWaitEvent, probes_->stream(), event, CU_EVENT_WAIT_DEFAULT);
  }
  if (lane.fill) {
    lane.coming = 0;
    std::exchange(lane.fill, nullptr)(lane);
  }
  if (lane.ahead == kForecast) {
    look_back(1 - lane.times);
    lane.ahead = forecast_.in_time(lane.way, lane.parts.size());
  }
}

void Device::note_rate(const Lane& lane) {
  const double seconds = std::chrono::duration<double>(Clock::now() - lane.first_landing).count();
  forecast_.landed(lane.way, lane.landed - lane.first_landed, seconds);
}

void Device::queue(Lane& lane, size_t parts) {
  std::vector<cuda::Copy> copies;  // of parts that spare() may have moved
  for (size_t k = lane.queued; k < lane.queued + parts; ++k) {
    const std::span<const cuda::Copy> more = lane.copies_of(lane.parts[k]);
    copies.insert(copies.end(), more.begin(), more.end());
  }
  const size_t calls = cuda::copy(lane.way, copies, copies_, lane.pinned) + 1;
  ZS_CUDA(cuStreamWriteValue64, copies_, counter_at_, mark_ + 1, CU_STREAM_WRITE_VALUE_DEFAULT);
  ++mark_;
  for (; parts != 0; --parts) lane.parts[lane.queued++].mark = mark_;
  lane.parts[lane.queued - 1].calls = calls;
  lane.calls_in_flight += calls;
}

std::shared_ptr<Probes> Device::probes() {
  const std::lock_guard lock(mutex_);
  if (!probes_) probes_ = Probes::load(context_, vram_);
  return probes_;
}

// Before anything of the lane is queued or lies elsewhere. The copies come after it, so that whoever waits
// for one of them waits for this too. With mutex_ held.
void Device::look_at_sources(Lane& lane) {
  if (lane.sampling.every == 0 || lane.parts.empty()) return;
  const uint64_t every = std::min<uint64_t>(std::exchange(lane.sampling.every, 0), lane.parts.size());
  try {
    if (!probes_) throw Error(Kind::usage, "the device has no kernel for it");
    std::vector<Probe::Run> runs;
    for (size_t k = lane.sampling.turn % every; k < lane.parts.size(); k += every) {
      const Lane::Part& part = lane.parts[k];
      lane.looks.push_back({part.name, part.first, part.last});
      for (const cuda::Copy& copy : lane.copies_of(part)) runs.push_back({copy.from, copy.nbytes});
    }
    lane.probe = probes_->probe(runs);
    lane.probe->launch(probes_->stream());
    lane.probe->fetch(probes_->stream());
    if (ordered_) ZS_CUDA(cuStreamWaitEvent, copies_, lane.probe->fetched(), CU_EVENT_WAIT_DEFAULT);
  } catch (const Error& error) {
    lane.unprobed = error.what();
    lane.looks.clear();
    lane.probe.reset();
  }
}

// With mutex_ held.
uint64_t Device::give_up(Lane& lane) {
  if (lane.queued == 0) lane.probe.reset();  // waits: there is no copy that comes after it
  const uint64_t given_up = lane.pending() + lane.coming;
  lane.parts.resize(lane.queued);
  lane.coming = 0;
  lane.fill = nullptr;
  if (lane.ordered != nullptr && lane.pooled) idle_events_.push_back(lane.ordered);
  lane.ordered = nullptr;
  return given_up;
}

void Device::extend(Lane& lane, uint64_t name, std::span<const cuda::Copy> copies) {
  const std::lock_guard lock(mutex_);
  if (lane.coming == 0) return;
  --lane.coming;
  lane.open(name);
  for (const cuda::Copy& copy : copies) lane.add(copy);
  wake_.notify_one();
}

uint64_t Device::drop(Lane& lane) noexcept {
  const std::lock_guard lock(mutex_);
  const uint64_t pending = give_up(lane);
  wake_.notify_one();
  return pending;
}

// What the driver says of a copy stream on which nothing has moved for long.
CUresult Device::doubt() {
  if (Clock::now() - moved_ < kDoubt) return CUDA_SUCCESS;
  moved_ = Clock::now();
  const CUresult result = cuda::driver().cuStreamQuery(copies_);
  return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
}

bool Device::turn(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Lane> lane = lanes_.front();
  const uint64_t shown = __atomic_load_n(counter_, __ATOMIC_ACQUIRE);
  std::vector<uint64_t> landed;
  std::exception_ptr error;
  uint64_t dropped = 0;
  const bool first = lane->landed == 0;
  if (first) lane->first_landing = Clock::now();
  while (lane->landed < lane->queued && lane->parts[lane->landed].mark <= shown) {
    Lane::Part& part = lane->parts[lane->landed++];
    if (first) lane->first_landed = lane->landed;
    lane->calls_in_flight -= part.calls;
    const bool last_in_a_row = lane->landed == lane->parts.size() || lane->landed == lane->kept_from ||
                               lane->parts[lane->landed].frozen;
    if (last_in_a_row && !part.frozen && lane->forecast) note_rate(*lane);
    landed.push_back(part.name);
    part.frozen = {};
  }
  const bool fresh = !std::exchange(lane->begun_told, true);
  bool moved = !landed.empty();
  if (moved) moved_ = Clock::now();
  try {
    prepare(*lane);
    look_at_sources(*lane);
    size_t most = std::max<uint64_t>(lane->ahead, lane->landed + kInFlight);
    // Twice as fast as they land, so that few calls meet the launches of training in any moment, and a guard
    // half way finds nothing left to do.
    most = std::min({most, 2 * lane->landed + kInFlight, lane->parts.size()});
    if (lane->held) most = std::min(most, lane->kept_from);
    if (lane->queued < most && (lane->calls_in_flight < kMostCalls || lane->queued == lane->landed)) {
      queue(*lane, std::min(lane->forecast ? 1 : kAtATime, most - lane->queued));
    } else if (!moved) {
      const CUresult state = doubt();
      if (state != CUDA_SUCCESS) lane->queued = lane->landed;  // a dead stream brings nothing any more
      cuda::check(state, "a copy in flight");
    }
  } catch (const Error&) {
    error = std::current_exception();
    dropped = give_up(*lane);
    moved = true;
  }
  const bool over = lane->over();
  if (over) {
    lane->seconds = std::chrono::duration<double>(Clock::now() - lane->begun).count();
    if (lane->forecast) look_back(1 - lane->times);  // the device may not have come by at the beginning
    lanes_.pop_front();
  }
  if (!moved && !over && !fresh) return false;
  lock.unlock();
  if (fresh) lane->landing->begun();
  if (!landed.empty()) lane->landing->landed(landed);
  if (error) lane->landing->dropped(dropped, error);
  if (over) lane->keep.reset();  // outside the lock: the last reference to a job may die here
  lock.lock();
  return true;
}

void Device::serve() {
  std::unique_lock lock(mutex_);
  try {
    const cuda::Context::Current current(*context_);
    // A graph that training records elsewhere is no concern of this thread's calls, and not broken by them.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    ZS_CUDA(cuThreadExchangeStreamCaptureMode, &mode);
    while (true) {
      if (lanes_.empty()) {
        if (stop_) return;
        wake_.wait(lock);
      } else if (!turn(lock)) {
        wake_.wait_for(lock, kLook);
      }
    }
  } catch (const Error&) {
    // No context: begin() fails in the same way and says so.
  }
}

}  // namespace zs
