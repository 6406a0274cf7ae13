// What torch asks of a build for Apple GPUs when autograd runs on their tensors: one device, one stream, no waiting.
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> {
  static Device device() { return Device(c10::DeviceType::MPS, 0); }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device()); }
  Stream getNewStream(Device, int = 0) const override { return getStream(device()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct FakeHooks final : at::MPSHooksInterface {
  FakeHooks() = default;
  explicit FakeHooks(at::MPSHooksArgs) {}
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(MPS, FakeGuard)
}
namespace at {
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, FakeHooks)
}
