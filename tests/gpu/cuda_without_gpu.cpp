// Makes PyTorch treat "cuda" as a device with one GPU whose streams and events do nothing, so that autograd runs on
// tensors without data. Load it before PyTorch, and call use_guard() after: PyTorch's CUDA build has its own hooks,
// which these outrank, and its own guard, which the one that is registered last replaces.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kGpu(c10::DeviceType::CUDA, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
  c10::Device getDevice() const override { return kGpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kGpu); }
};

struct CUDAHooks : at::CUDAHooksInterface { // PyTorch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  long versionCuDNN() const override { return 91000; } // the networks ask whether there is one
  long versionRuntimeCuDNN() const override { return 91000; }
};

using Hooks = c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs>;
const Hooks hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(), Hooks::DefaultCreator<CUDAHooks>);

} // namespace

extern "C" void use_guard() {
  static Guard guard;
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
}
