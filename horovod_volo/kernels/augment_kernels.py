"""Triton kernels that augment and normalise uint8 images (batch, 3, height, width).

A program works on some pixels of one image. Which operation it applies is a number among the image's
parameters, so its branches are the same for all threads. Arithmetic follows data/augmentation step by step,
without fused multiplication and addition, because truncation to integers would show the difference.
"""

# One argument per line would hide what a kernel does.
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from horovod_volo.kernels.augment import PixelOp

# In the order of PixelOp, without COPY.
(
    INVERT, POSTERIZE, SOLARIZE, SOLARIZE_ADD, BRIGHTNESS, COLOR, SHARPNESS,
    AUTO_CONTRAST, EQUALIZE, CONTRAST, ALONG_X, ALONG_Y, ROTATE,
) = (tl.constexpr(int(operation)) for operation in PixelOp if operation)


@triton.jit
def _gray(image, area, pixel, exists):
    """Return the gray levels of pixels of one image, as in `color_ops`."""
    red = tl.load(image + pixel, mask=exists, other=0).to(tl.int32)
    green = tl.load(image + area + pixel, mask=exists, other=0).to(tl.int32)
    blue = tl.load(image + 2 * area + pixel, mask=exists, other=0).to(tl.int32)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


@triton.jit
def _truncated(value):
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def _blended(other, value, factor):
    return _truncated((value.to(tl.float32) - other) * factor + other)


@triton.jit
def statistics_tables(images, parameters, tables, area, columns, block: tl.constexpr):
    """Write the table of one channel of one image, if its operation needs one."""
    image, channel = tl.program_id(0) // 3, tl.program_id(0) % 3
    operation = tl.load(parameters + image * columns).to(tl.int32)
    start = images + image.to(tl.int64) * 3 * area
    level = tl.arange(0, 256)
    table = tables + tl.program_id(0) * 256 + level
    if operation == CONTRAST:
        total = tl.zeros((block,), tl.int32)
        for first in range(0, area, block):
            pixel = first + tl.arange(0, block)
            total += _gray(start, area, pixel, pixel < area)
        mean = tl.div_rn(tl.sum(total, axis=0).to(tl.float32), area.to(tl.float32))
        factor = tl.load(parameters + image * columns + 2).to(tl.float32)
        tl.store(table, _blended(tl.floor(mean + 0.5), level, factor).to(tl.uint8))
    elif (operation == AUTO_CONTRAST) | (operation == EQUALIZE):
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, area, block):
            pixel = first + tl.arange(0, block)
            value = tl.load(start + channel * area + pixel, mask=pixel < area, other=0)
            counts += tl.histogram(value.to(tl.int32), 256)
        # What lies beyond the last pixel was counted as 0.
        counts -= tl.where(level == 0, tl.cdiv(area, block) * block - area, 0)
        low = tl.min(tl.where(counts > 0, level, 255), axis=0)
        high = tl.max(tl.where(counts > 0, level, 0), axis=0)
        if operation == AUTO_CONTRAST:
            scale = tl.div_rn(1.0, tl.maximum(high - low, 1).to(tl.float32)) * 255.0
            stretched = _truncated((level - low).to(tl.float32) * scale)
            tl.store(table, tl.where(high > low, stretched, level).to(tl.uint8))
        else:
            step = (area - tl.sum(tl.where(level == high, counts, 0), axis=0)) // 255
            before = tl.cumsum(counts, axis=0) - counts
            equalized = tl.minimum((step // 2 + before) // tl.maximum(step, 1), 255)
            tl.store(table, tl.where(step > 0, equalized, level).to(tl.uint8))


@triton.jit
def apply_layer(
    images, parameters, tables, augmented, height, width, columns, block: tl.constexpr
):
    """Write what the operation of an image makes of it."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    area = height * width
    own = parameters + image * columns
    operation = tl.load(own).to(tl.int32)
    start, to = images + image.to(tl.int64) * 3 * area, augmented + image.to(tl.int64) * 3 * area
    if operation >= ALONG_X:
        _resample(start, own, to, operation, pixel, height, width, block)
    else:
        _map_values(start, own, tables + image * 3 * 256, to, operation, pixel, height, width, block)


@triton.jit
def _map_values(image, own, table, to, operation, pixel, height, width, block: tl.constexpr):
    area = height * width
    exists = pixel < area
    argument = tl.load(own + 2).to(tl.float32)
    whole = argument.to(tl.int32)
    column, row = pixel % width, pixel // width
    inside = exists & (column > 0) & (column < width - 1) & (row > 0) & (row < height - 1)
    other = tl.zeros((block,), tl.float32)
    if operation == COLOR:
        other = _gray(image, area, pixel, exists).to(tl.float32)
    for channel in range(3):
        source = image + channel * area + pixel
        value = tl.load(source, mask=exists, other=0).to(tl.int32)
        if operation == SHARPNESS:
            around = 4 * value
            for below in tl.static_range(-1, 2):
                for beside in tl.static_range(-1, 2):
                    around += tl.load(source + below * width + beside, mask=inside, other=0).to(tl.int32)
            # Pillow's kernel, rounded: 5 at the centre and 1 for the eight neighbors, over 13.
            other = tl.where(inside, (2 * around + 13) // 26, value).to(tl.float32)
        mapped = value
        if (operation == BRIGHTNESS) | (operation == COLOR) | (operation == SHARPNESS):
            mapped = _blended(other, value, argument)
        elif operation >= AUTO_CONTRAST:
            mapped = tl.load(table + channel * 256 + value, mask=exists, other=0).to(tl.int32)
        inverted = (operation == INVERT) | ((operation == SOLARIZE) & (value >= whole))
        mapped = tl.where(inverted, 255 - value, mapped)
        mapped = tl.where(operation == POSTERIZE, value & whole, mapped)
        mapped = tl.where((operation == SOLARIZE_ADD) & (value < 128), value + whole, mapped)
        tl.store(to + channel * area + pixel, mapped.to(tl.uint8), mask=exists)


@triton.jit
def _weight(tap, beyond, bicubic):
    """Return the weight of one of four neighbours; `beyond` is the distance from the second."""
    ahead = 1 - beyond
    # The last two are the first two, seen from the other side.
    near, far = tl.where(tap < 2, beyond, ahead), tl.where(tap < 2, ahead, beyond)
    outer = (tap == 0) | (tap == 3)
    cubic = tl.where(outer, -near * far * far, (near - 2) * near * near + 1)
    return tl.where(bicubic, cubic, tl.where(outer, 0.0, far))


@triton.jit
def _resample(image, own, to, operation, pixel, height, width, block: tl.constexpr):
    area = height * width
    exists = pixel < area
    bicubic = tl.load(own + 1) > 0
    column, row = pixel % width, pixel // width
    if operation == ROTATE:
        x, y = column.to(tl.float32) + 0.5, row.to(tl.float32) + 0.5
        at = own + 3
        source_x = tl.load(at).to(tl.float32) * x + (
            tl.load(at + 1).to(tl.float32) * y + tl.load(at + 2).to(tl.float32)
        )
        source_y = tl.load(at + 3).to(tl.float32) * x + (
            tl.load(at + 4).to(tl.float32) * y + tl.load(at + 5).to(tl.float32)
        )
        outside = tl.maximum(tl.abs(source_x), tl.abs(source_y)) >= 1
        x = (source_x + 1) * (width / 2).to(tl.float32) - 0.5
        y = (source_y + 1) * (height / 2).to(tl.float32) - 0.5
        # As grid_sample does for the edge; the bicubic filter repeats edge pixels.
        x = tl.where(bicubic, x, tl.minimum(tl.maximum(x, 0.0), width - 1.0))
        y = tl.where(bicubic, y, tl.minimum(tl.maximum(y, 0.0), height - 1.0))
        left, top = tl.floor(x), tl.floor(y)
        beyond_x, beyond_y = x - left, y - top
        left, top = left.to(tl.int32), top.to(tl.int32)
    else:
        along_x = operation == ALONG_X
        line, place = tl.where(along_x, row, column), tl.where(along_x, column, row)
        shift = (tl.load(own + 3) * (line.to(tl.float64) + 0.5) + tl.load(own + 4)).to(tl.float32)
        whole = tl.floor(shift)
        source = place.to(tl.float32) + (shift + 0.5)
        outside = (source < 0) | (source >= tl.where(along_x, width, height))
        left = tl.where(along_x, column + whole.to(tl.int32), column)
        top = tl.where(along_x, row, row + whole.to(tl.int32))
        beyond_x, beyond_y = tl.where(along_x, shift - whole, 0.0), tl.where(along_x, 0.0, shift - whole)
    # In a direction without interpolation the second neighbour has weight 1 and the others 0.
    shown = exists & (outside == 0)
    zeros = tl.zeros((block,), tl.float32)
    red, green, blue = zeros, zeros, zeros
    for below in range(4):
        tall = _weight(below, beyond_y, bicubic)
        line = tl.minimum(tl.maximum(top - 1 + below, 0), height - 1) * width
        reds, greens, blues = zeros, zeros, zeros
        for beside in range(4):
            wide = _weight(beside, beyond_x, bicubic)
            source = image + line + tl.minimum(tl.maximum(left - 1 + beside, 0), width - 1)
            used = shown & (tall != 0) & (wide != 0)
            reds += tl.load(source, mask=used, other=0).to(tl.float32) * wide
            greens += tl.load(source + area, mask=used, other=0).to(tl.float32) * wide
            blues += tl.load(source + 2 * area, mask=used, other=0).to(tl.float32) * wide
        red += reds * tall
        green += greens * tall
        blue += blues * tall
    # Outside the image: ImageNet's mean color.
    tl.store(to + pixel, tl.where(outside, 124, _truncated(red)).to(tl.uint8), mask=exists)
    tl.store(to + area + pixel, tl.where(outside, 116, _truncated(green)).to(tl.uint8), mask=exists)
    tl.store(to + 2 * area + pixel, tl.where(outside, 104, _truncated(blue)).to(tl.uint8), mask=exists)


@triton.jit
def normalize_images(
    images, mean, std, boxes, noise, result, height, width,
    count: tl.constexpr, mode: tl.constexpr, block: tl.constexpr,
):
    """Write normalised pixels, and what the boxes of the image get; later boxes cover earlier ones."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    area = height * width
    exists = pixel < area
    start = image.to(tl.int64) * 3 * area
    column, row = pixel % width, pixel // width
    for channel in range(3):
        at = start + channel * area + pixel
        value = tl.load(images + at, mask=exists, other=0).to(tl.float32)
        deviation = tl.load(std + channel) + tl.zeros((block,), tl.float32)
        value = tl.div_rn(value - tl.load(mean + channel), deviation)
        for number in tl.static_range(count):
            box = boxes + (image * count + number) * 5
            top, left = tl.load(box).to(tl.int32), tl.load(box + 1).to(tl.int32)
            tall, wide = tl.load(box + 2).to(tl.int32), tl.load(box + 3).to(tl.int32)
            erased = (row >= top) & (row < top + tall) & (column >= left) & (column < left + wide)
            content = tl.zeros((block,), tl.float32)
            if mode == "pixel":
                source = noise + tl.load(box + 4) + (channel * tall + row - top) * wide + column - left
                content = tl.load(source, mask=exists & erased, other=0.0)
            elif mode == "rand":
                content += tl.load(noise + tl.load(box + 4) + channel)
            value = tl.where(erased, content, value)
        tl.store(result + at, value, mask=exists)
